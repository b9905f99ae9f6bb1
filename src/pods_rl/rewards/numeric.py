"""Read numbers exactly, with commas, fractions, currency, percent and units; never through a float."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 1000  # characters of an answer that are read at all: bounds every pattern below
MAX_EXPONENT = 400  # 1e400 is beyond every answer; 1e999999999 would fill the memory

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_PART = rf"(?:{_UNSIGNED})(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(
    rf"(?<![\w.,])(?P<sign>(?<![\w)])[+-])?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/))?"
    rf"(?P<top>{_PART})(?:\s*/\s*(?P<bottom>{_PART}))?"
)
_SIMPLE = r"-?[0-9.,]+"
_FRACTION = re.compile(rf"\\[dt]?frac\s*(?:\{{\s*({_SIMPLE})\s*\}}\s*\{{\s*({_SIMPLE})\s*\}}|([0-9])\s*([0-9]))")
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# Units that would be read as variables or powers: an upright single letter (i, e and d are none), a squared length.
_LENGTH = r"mm|cm|dm|km|in|ft|yd|mi|units?|inch(?:es)?|f(?:ee|oo)t|met(?:er|re)s?|miles?|yards?"
_UPRIGHT = r"\\(?:text|textrm|mathrm|mbox)\s*"
_POWER = r"\s*(?:\^\s*\{?\s*[23]\s*\}?|[²³])"
_UNIT = re.compile(
    rf"(?<=[0-9])(?:\\[,;: ]|[~\s]){{0,4}}(?:{_UPRIGHT}\{{\s*[mgshLNJWVAKCF]\s*\}}(?:{_POWER})?"
    rf"|(?:{_UPRIGHT}\{{\s*(?:m|{_LENGTH})\s*\}}|(?:{_LENGTH})(?![A-Za-z])){_POWER})(?=[\s.$]*$)"
)
_DROPPED = re.compile(
    r"\\(?:left|right)(?![a-z])|\\displaystyle|(?<!\\)\\[!,;:()\[\]]"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\degree|[°$€£¥₹]|\*\*"
)
_SPACE = re.compile(r"(?<!\\)\\ |~|\s+")
_WORD = re.compile(r"[^\W\d_]+")
_VARIABLE = re.compile(r"[A-Za-z](?![A-Za-z])")  # right after a number, so no article
_BESIDE_A_NUMBER = frozenset(" .,;:?'\"-%")
_WORDS_THAT_CHANGE_A_NUMBER = {
    *(
        "minus",
        "negative",
        "not",
        "half",
        "quarter",
        "third",
        "twice",
        "double",
        "triple",
        "squared",
        "cubed",
    ),
    *("root", "over", "times", "plus", "hundred", "thousand", "million", "billion", "trillion", "dozen"),
}


class Number(NamedTuple):
    """An exact number; `percent` says that a percent sign followed it."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Compare exactly; 50% equals both 50 and 0.5, since datasets write either.

        >>> Number(Fraction(50), percent=True).equals(Number(Fraction(1, 2)))
        True
        """
        return self.value == other.value or self.fraction == other.fraction

    @property
    def fraction(self) -> Fraction:
        """The value with its percent sign worked out."""
        return self.value / 100 if self.percent else self.value


def plain(text: str) -> str:
    r"""Strip the dress of an answer: LaTeX spacing and text, currency, degrees, squared units, bold, a full stop.

    >>> plain(r"$\text{about }\$1{,}200$."), plain(r"-\dfrac{1}{2}"), plain(r"90^\circ"), plain(r"6\text{ cm}^2")
    ('about 1,200', '-1/2', '90', '6')
    """
    text = text.replace(r"\$", "").replace(r"\%", "%").replace("{,}", ",").replace("−", "-").replace("–", "-")
    text = _STYLED.sub(r" \1 ", _UNIT.sub("", _FRACTION.sub(_inline_fraction, text)))
    text = _DROPPED.sub("", text)
    text = _SPACE.sub(" ", text).strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def read_number(text: str) -> Number | None:
    """Read a `plain` text that is a number and nothing else (a percent sign may follow), or None.

    Mixed numbers, fractions and exponents up to `MAX_EXPONENT` are read; a zero denominator is no number.

    >>> read_number("1,200.50"), read_number("2 1/2").value, read_number("12,34") is None
    (Number(value=Fraction(2401, 2), percent=False), Fraction(5, 2), True)
    """
    match = _NUMBER.match(text)
    rest = text[match.end() :].strip() if match else "?"
    return _value(match, percent=bool(rest)) if match and rest in ("", "%") else None


def read_number_in_words(text: str) -> Number | None:
    """Read the one number of a `plain` text that has only words around it ("18 dollars a day"), or None.

    Two numbers are no answer, so a list of guesses never scores. Single letters may be variables and words
    such as "minus" or "million" change the number: both give None. Of an equation the last side is read.

    >>> read_number_in_words("9 * 2 = 18 dollars").value, read_number_in_words("17 or 18") is None
    (Fraction(18, 1), True)
    """
    if "=" in text and not re.search("[<>!≠≤≥≈]", text):
        text = text.rpartition("=")[2].strip()
    match = _NUMBER.search(text)
    if match is None:
        return None
    after = text[match.end() :]
    rest = f"{text[: match.start()]} {after}"
    words = _WORD.findall(rest)
    if not set(_WORD.sub("", rest)) <= _BESIDE_A_NUMBER:
        return None
    variable = _VARIABLE.match(after) or any(len(word) == 1 and word not in "aAI" for word in words)
    if variable or any(word.lower() in _WORDS_THAT_CHANGE_A_NUMBER for word in words):
        return None
    return _value(match, percent=after.lstrip().startswith(("%", "percent")))


def _inline_fraction(match: re.Match[str]) -> str:
    top, bottom = (part for part in match.groups() if part)
    mixed = match.string[max(match.start() - 1, 0) : match.start()].isdigit()
    return f"{' ' if mixed else ''}{top}/{bottom}"


def _value(match: re.Match[str], *, percent: bool) -> Number | None:
    top, bottom = _exact(match["top"]), _exact(match["bottom"] or "1")
    if top is None or not bottom:
        return None
    value = int(match["whole"] or 0) + top / bottom
    return Number(-value if (match["sign"] or "").startswith("-") else value, percent)


def _exact(part: str) -> Fraction | None:
    if len(part) > MAX_LENGTH:
        return None
    mantissa, _, exponent = part.replace(",", "").lower().partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
