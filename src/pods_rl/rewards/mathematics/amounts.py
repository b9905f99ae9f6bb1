r"""Compare amounts in several units, `6 ft 2 in`, one unit at a time. Nothing is converted."""

from __future__ import annotations

import re
from fractions import Fraction

from .notation import plain
from .numerals import NUMBER, number_of
from .unit_names import unit_named

_AMOUNT = r"[0-9]+(?:\.[0-9]+)?(?:\s*/\s*[0-9]+)?"
_PART = rf"(?P<number>{_AMOUNT})\s*-?\s*(?P<unit>[A-Za-z]+)\.?"
_FIRST = re.compile(rf"\s*{_PART}")
_NEXT = re.compile(rf"\s*(?:,?\s*(?:and|&)\s+|,\s*)?{_PART}")
_FOOT_AND_INCH = (  # 6'2", 5^\prime
    (re.compile(r"\^\s*\{?\s*\\prime\s*\\prime\s*\}?|''|\""), " in "),
    (re.compile(r"\^\s*\{?\s*\\prime\s*\}?|'"), " ft "),
)
_FEET_AND_INCHES = re.compile(rf"\s*{_AMOUNT}\s*(?:'|\^\s*\{{?\s*\\prime\s*\}}?)\s*{_AMOUNT}\s*(?:''|\"|\^)")


def read_amounts(text: str) -> list[tuple[Fraction, str]] | None:
    r"""Return the numbers of an answer in several units and these units, or None.

    >>> [(str(number), unit) for number, unit in read_amounts("6 feet and 2 inches")]
    [('6', 'ft'), ('2', 'in')]
    >>> read_amounts("6'2\"") == read_amounts(r"6\text{ ft }2\text{ in}"), read_amounts("6 ft") is None
    (True, True)
    """
    text = plain(text)
    if _FEET_AND_INCHES.match(text):
        for mark, unit in _FOOT_AND_INCH:
            text = mark.sub(unit, text)
    part = _FIRST.match(text)
    amounts = []
    while part:
        name = unit_named(part["unit"])
        match = NUMBER.fullmatch(part["number"])
        number = number_of(match, percent=False) if match else None
        if name is None or number is None:
            return None
        amounts.append((number.value, name))
        end = part.end()
        part = _NEXT.match(text, end)
    if len(amounts) < 2 or text[end:].strip(" ."):
        return None
    return amounts
