r"""Read the modulus of an answer: `5 \pmod 7` is 5, and 7 is the modulus."""

from __future__ import annotations

import re

_MODULUS = re.compile(
    r"\s*(?:\\pmod\s*(?:\{\s*(?P<braced>[^{}]+?)\s*\}|(?P<sign>[0-9A-Za-z]))"  # \pmod{7}, \pmod 7
    r"|\(\s*\\?mod(?:ulo)?\s*\{?\s*(?P<bracketed>[^(){}]+?)\s*\}?\s*\)"  # (mod 7)
    r"|\\?(?:mod|bmod)\s*(?:\{\s*(?P<operand>[^{}]+?)\s*\}|(?P<number>[0-9]+|[A-Za-z]))"  # \mod 7, mod 7
    r"|(?<![A-Za-z])modulo\s+(?P<word>[0-9]+))\s*$"
)
_CONGRUENT = re.compile(r"\\equiv(?![a-z])|\\cong(?![a-z])")
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def split_modulus(text: str) -> tuple[str, str] | None:
    r"""Return a `plain` text without its modulus, and the modulus; None if it has none.

    >>> split_modulus(r"x \equiv 5 \pmod{7}"), split_modulus("5 (mod 7)"), split_modulus("5")
    (('x = 5', '7'), ('5', '7'), None)
    """
    modulus = _MODULUS.search(text)
    if modulus is None or not text[: modulus.start()].strip():
        return None
    found = next(filter(None, modulus.groupdict().values()))
    sides = [side.strip() for side in _CONGRUENT.split(text[: modulus.start()])]
    remainders = {_remainder(side, found) for side in sides}
    if len(remainders) == 1 and None not in remainders:  # 12 \equiv 5
        sides = sides[-1:]
    return " = ".join(sides), "".join(found.split())


def with_remainder(text: str, modulus: str) -> str:
    """Return a text whose number, alone or on the right side, is divided by the modulus, if both are in digits.

    >>> with_remainder("12", "7"), with_remainder("x = 12", "7"), with_remainder("a", "n")
    ('5', 'x = 5', 'a')
    """
    name, equals, number = text.rpartition("=")
    rest = _remainder(number.strip(), modulus)
    if rest is None:
        return text
    return f"{name}{equals} {rest}" if equals else str(rest)


def _remainder(number: str, modulus: str) -> int | None:
    """Return the remainder of a number, or None where one of both is not a number in digits."""
    if not _INTEGER.fullmatch(number) or not _INTEGER.fullmatch(modulus) or int(modulus) <= 0:
        return None
    return int(number) % int(modulus)
