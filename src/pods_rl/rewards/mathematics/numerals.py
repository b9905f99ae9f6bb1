"""Read a text that is only a number in digits, exactly: never through a float."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from .notation import MAX_LENGTH

MAX_EXPONENT = 400  # 1e400 is beyond every answer; 1e999999999 would fill the memory

_UNSIGNED = (
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])"  # 1,200
    r"|[0-9]+)(?:\.[0-9]*)?"  # 1200, 1200.5
    r"|\.[0-9]+"  # .5
)
_WITH_EXPONENT = rf"(?:{_UNSIGNED})(?:[eE][+-]?[0-9]+)?"  # 1e-9
NUMBER = re.compile(
    r"(?<![\w.,])(?P<sign>(?<![\w)])[+-])?"  # -3, but not the sign of x-3
    r"(?:(?P<units>[0-9]+)\s+(?=[0-9]+\s*/))?"  # 2 of 2 1/2
    rf"(?P<top>{_WITH_EXPONENT})(?:\s*/\s*(?P<bottom>{_WITH_EXPONENT}))?"  # 1/2
)
_SIMPLE = r"-?[0-9.,]+"
_LATEX_FRACTION = re.compile(
    r"(?<![0-9])([0-9]+\s*|)\\[dtc]?frac\s*"  # 2\frac{1}{2} is mixed
    rf"(?:\{{\s*({_SIMPLE})\s*\}}\s*\{{\s*({_SIMPLE})\s*\}}"  # \frac{1}{2}
    r"|([0-9])\s*([0-9])"  # \frac12
    rf"|([0-9])\s*\{{\s*({_SIMPLE})\s*\}}"  # \frac1{2}
    rf"|\{{\s*({_SIMPLE})\s*\}}\s*([0-9]))"  # \frac{1}2
    r"(?![0-9.^_!{])"
)
PERCENT = re.compile(r"\s*(?:%|percent(?:age)?(?![a-z])|pct(?![a-z]))")  # 5%, 5 percent, 5 pct


class Number(NamedTuple):
    """An exact number; `percent` says that a percent sign followed it, `bound` that it is one ("at least 12": `>=`)."""

    value: Fraction
    percent: bool = False
    bound: str = ""

    def equals(self, gold: Number) -> bool:
        """Compare exactly; 50% equals both 50 and 0.5, since datasets write either. Bounds must be the same.

        A gold answer below 1 without a percent sign is not a percentage: 0.5% does not equal 1/2.
        """
        if self.bound != gold.bound:
            return False
        may_lack_its_sign = gold.percent or not self.percent or abs(gold.value) >= 1
        return self.fraction == gold.fraction or (may_lack_its_sign and self.value == gold.value)

    @property
    def fraction(self) -> Fraction:
        """The value with its percent sign worked out."""
        return self.value / 100 if self.percent else self.value


def read_number(text: str) -> Number | None:
    """Read a `plain` text that is only a number (a percent sign may follow), or return None.

    Mixed numbers, fractions and exponents up to `MAX_EXPONENT` are read; a zero denominator gives None.

    >>> read_number("1,200.50").value, read_number("2 1/2").value, read_number("12,34") is None
    (Fraction(2401, 2), Fraction(5, 2), True)
    """
    if len(text) > MAX_LENGTH:
        return None
    text = inline_fractions(text).strip()
    match = NUMBER.match(text)
    if match is None:
        return None
    end = match.end()
    percent = PERCENT.match(text, end)
    if percent:
        end = percent.end()
    if end != len(text):
        return None
    return number_of(match, percent=bool(percent))


def inline_fractions(text: str) -> str:
    """Write the LaTeX fractions of a text with a slash: `2 1/2`."""
    return _LATEX_FRACTION.sub(_inline_fraction, text)


def _inline_fraction(fraction: re.Match[str]) -> str:
    # the units and one of the four spellings: three groups took part
    units, top, bottom = (part for part in fraction.groups() if part is not None)
    return f"{units} {top}/{bottom}" if units else f"{top}/{bottom}"


def number_of(match: re.Match[str], *, percent: bool) -> Number | None:
    """Return the number that a match of `NUMBER` stands for, or None if it has no value or is too large."""
    value = _exact(match["top"])
    if value is None:
        return None
    if match["bottom"]:
        divisor = _exact(match["bottom"])
        if not divisor:
            return None
        value /= divisor
    if match["units"]:
        value += int(match["units"])
    if match["sign"] == "-":
        value = -value
    return Number(value, percent)


def _exact(numeral: str) -> Fraction | None:
    """Return the value of digits with an exponent, or None where it would need too much memory."""
    if len(numeral) > MAX_LENGTH:
        return None
    mantissa, _, exponent = numeral.replace(",", "").lower().partition("e")
    if not exponent:
        return Fraction(int(mantissa) if mantissa.isdigit() else mantissa)
    if abs(int(exponent)) > MAX_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent)
