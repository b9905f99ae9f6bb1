"""Read numbers, worked arithmetic and the names of quantities: exactly, never through a float or `eval`."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 1000  # maximum characters of an answer: bounds every pattern below
MAX_EXPONENT = 400  # 1e400 is beyond every answer; 1e999999999 would fill the memory

_UNSIGNED = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_PART = rf"(?:{_UNSIGNED})(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(
    rf"(?<![\w.,])(?P<sign>(?<![\w)])[+-])?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/))?"
    rf"(?P<top>{_PART})(?:\s*/\s*(?P<bottom>{_PART}))?"
)
_SIMPLE = r"-?[0-9.,]+"
_FRACTION = re.compile(
    rf"(?<![0-9])([0-9]+\s*|)\\[dtc]?frac\s*(?:\{{\s*({_SIMPLE})\s*\}}\s*\{{\s*({_SIMPLE})\s*\}}"
    rf"|([0-9])\s*([0-9])|([0-9])\s*\{{\s*({_SIMPLE})\s*\}}|\{{\s*({_SIMPLE})\s*\}}\s*([0-9]))(?![0-9.^_!{{])"
)
_PERCENT = re.compile(r"\s*(?:%|percent(?:age)?(?![a-z])|pct(?![a-z]))")
_COMMA_AMONG_WORDS = re.compile(r"(?<![\w.,])([0-9]+),([0-9]{2}|[0-9]{4,})(?![\w,]|\.[0-9])")
_DECIMAL_COMMA = re.compile(r"[+-]?(?:0,[0-9]+|[0-9]+,(?:[0-9]{2}|[0-9]{4,}))")

_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_LETTER = re.compile(r"[A-Za-z](?![A-Za-z])")  # right after a number, so no article
_BULLET = re.compile(r"\s*[-*•]\s+")
_QUOTES = re.compile(r"(['\"])\s*$")
_BESIDE_A_NUMBER = frozenset(" .,;:?")
_CHANGING = (
    "minus negative not half quarter third twice double triple squared cubed root over times plus hundred thousand "
    "million billion trillion dozen factorial sin cos tan cot sec csc log ln exp sqrt abs mod "
    "never neither nor cannot t false wrong incorrect"  # the t of isn't
)
WORDS_THAT_CHANGE_A_NUMBER = frozenset(_CHANGING.split())

_CLAUSE = re.compile(r"[;,.]\s+|\n")
_SEVERAL = re.compile(r",(?![0-9]{3}(?![0-9]))|(?<![a-z])(?:and|or)(?![a-z])|[<>!]|\\(?:le|ge|lt|gt|ne|approx|pm)")
_UNIT_IN_SUM = re.compile(r"(?:/\s*|\bper\s+)?[A-Za-z]{2,}|\ba\s+(?=[a-z]{2})|%")

_GREEK = "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi"
_SYMBOL = (
    rf"(?:[A-Za-z]|[A-Z]{{2,5}}|\\(?:{_GREEK}|chi|psi|omega|Delta|Gamma|Theta|Lambda|Sigma|Phi|Psi|Omega|ell)(?![a-z])"
    r"|\\(?:vec|bar|hat|overline|tilde|dot|overrightarrow|mathbf|mathcal)\s*\{[^{}]*\})"
    r"\s*(?:_\s*(?:\{[^{}]*\}|[A-Za-z0-9]))?'*"
)
_SEGMENTS = re.compile(r"\s*(?:\|\s*[A-Z]{2,5}\s*\||\\[dtc]?frac\s*\{\s*[A-Z]{2,5}\s*\}\s*\{\s*[A-Z]{2,5}\s*\})\s*")
_ARGUMENT = rf"\s*-?\s*(?:[0-9]+(?:\.[0-9]+)?|{_SYMBOL})\s*"
_NAME = re.compile(
    rf"\s*(?:m?\s*\\angle\s*)?{_SYMBOL}(?:\s*\^\s*\{{\s*-1\s*\}}(?=\s*\())?(?:\s*\({_ARGUMENT}(?:,{_ARGUMENT})*\))?\s*"
)
_PHRASE = re.compile(r"[A-Za-z]{3,}(?:[\s'-]+[A-Za-z]+)*")
_NEGATION = re.compile(r"(?i)\b(?:not|never|nor|cannot)\b|n't")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


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


def read_number(text: str) -> Number | None:
    """Read a `plain` text that is only a number (a percent sign may follow), or return None.

    Mixed numbers, fractions and exponents up to `MAX_EXPONENT` are read; a zero denominator gives None.

    >>> read_number("1,200.50"), read_number("2 1/2").value, read_number("12,34") is None
    (Number(value=Fraction(2401, 2), percent=False), Fraction(5, 2), True)
    """
    text = _FRACTION.sub(_inline_fraction, text).strip()
    match = _NUMBER.match(text)
    if match is None:
        return None
    percent = _PERCENT.match(text, match.end())
    return _value(match, percent=bool(percent)) if (percent or match).end() == len(text) else None


def read_decimal_comma(text: str) -> Number | None:
    """Read a `plain` number whose comma can only be a decimal comma, or return None.

    >>> read_decimal_comma("1000,99").value, read_decimal_comma("1,200"), read_decimal_comma("3,5")
    (Fraction(100099, 100), None, None)
    """
    return read_number(text.replace(",", ".")) if _DECIMAL_COMMA.fullmatch(text) else None


def read_number_in_words(text: str) -> Number | None:
    """Read the only number of a `plain` text with words around it ("18 dollars a day"), or return None.

    Two numbers give None, so that a list of guesses never scores. Single letters may be variables and words
    such as "minus" or "million" change the number: both give None. Of an equation, the right side is read if the
    left side is a name, or arithmetic that is true.

    >>> read_number_in_words("9 * 2 = 18 dollars").value, read_number_in_words("17 or 18") is None
    (Fraction(18, 1), True)
    >>> read_number_in_words("x = 18").value, read_number_in_words("2x = 18"), read_number_in_words("9 * 3 = 18")
    (Fraction(18, 1), None, None)
    """
    if "=" in text:
        text = _right_side(text)
    text = _FRACTION.sub(_inline_fraction, _COMMA_AMONG_WORDS.sub(r"\1.\2", text))
    match = _NUMBER.search(text)
    if match is None:
        return None
    before, after = text[: match.start()], text[match.end() :]
    quote = _QUOTES.search(before)
    if quote and after.lstrip().startswith(quote[1]):
        before, after = before[: quote.start()], after.lstrip()[1:]
    percent = _PERCENT.match(after)
    rest = f"{_BULLET.sub('', before, count=1)} {after[percent.end() if percent else after.startswith('-') :]}"
    words = _WORD.findall(rest)
    if not set(_WORD.sub("", rest)) <= _BESIDE_A_NUMBER or re.match(r"-(?![A-Za-z]{2})", after):
        return None
    if _LETTER.match(after) or may_change(words, WORDS_THAT_CHANGE_A_NUMBER):
        return None
    return _value(match, percent=bool(percent))


def is_name(text: str) -> bool:
    r"""Whether a `plain` text names one quantity: a variable, a function of some, segments, or words.

    >>> [is_name(text) for text in ("x", "x_1", "f(x)", r"\theta", "AB", "Total cost")]
    [True, True, True, True, True, True]
    >>> [is_name(text) for text in ("2x", "xy", "x+y", "x^2", "|x|", "x(x+1)", r"\pi")]
    [False, False, False, False, False, False, False]
    """
    text = text.strip().removesuffix(":").strip()
    if _NAME.fullmatch(text) or _SEGMENTS.fullmatch(text):
        return True
    return bool(_PHRASE.fullmatch(text)) and text.lower() not in _ALPHABET and not _NEGATION.search(text)


def may_change(words: Sequence[str], changing: frozenset[str]) -> bool:
    """Whether one of the words around a number or a formula changes it, or may be a variable (a single letter).

    >>> may_change(["a", "half"], WORDS_THAT_CHANGE_A_NUMBER), may_change(["a", "day"], WORDS_THAT_CHANGE_A_NUMBER)
    (True, False)
    """
    parts = {part for word in words for part in re.split("['’-]", word.lower())}
    return bool(parts & changing) or any(len(word) == 1 and word not in "aAI" for word in words)


def _right_side(text: str) -> str:
    """The right side of an equation that states a value (`x = 5`) or is true arithmetic, else an empty text."""
    *earlier, last = _CLAUSE.split(text)
    *left, right = last.split("=")
    if not left or _SEVERAL.search(last) or not all(map(_is_true, earlier)):
        return ""
    named = is_name(left[0]) and not earlier and not any(map(is_name, left[1:]))
    return right if named or _is_true(last) else ""


def _is_true(equation: str) -> bool:
    """Whether worked arithmetic has the same value on every side; words around it do not count."""
    sides = [_UNIT_IN_SUM.sub(" ", side) for side in equation.rpartition(":")[2].split("=")]
    values = {read[0] if (read := read_expression(side)) else None for side in sides}
    return len(sides) > 1 and len(values) == 1 and None not in values


def _inline_fraction(match: re.Match[str]) -> str:
    whole, top, bottom = (part for part in match.groups() if part is not None)
    return f"{whole} {top}/{bottom}" if whole else f"{top}/{bottom}"


def _value(match: re.Match[str], *, percent: bool) -> Number | None:
    value, bottom = _exact(match["top"]), match["bottom"]
    if value is not None and bottom:
        divisor = _exact(bottom)
        value = value / divisor if divisor else None
    if value is None:
        return None
    value += int(match["whole"] or 0)
    return Number(-value if (match["sign"] or "").startswith("-") else value, percent)


def _exact(part: str) -> Fraction | None:
    if len(part) > MAX_LENGTH:
        return None
    mantissa, _, exponent = part.replace(",", "").lower().partition("e")
    if not exponent:
        return Fraction(int(mantissa) if mantissa.isdigit() else mantissa)
    return Fraction(mantissa) * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MAX_EXPONENT else None


# -- arithmetic -------------------------------------------------------------------------------------------------------

_INNER_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DRESS = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ()\[\]]|[$`]")
_TIMES = re.compile(r"\\(?:times|cdot)(?![a-z])|(?<=[0-9)\s])[xX](?=[0-9(\s])")
_OPERATORS = str.maketrans("×·∗÷∶−–[]{}", "***//--()()")
_IMPLICIT = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_OPERAND = r"[0-9]{1,100}(?:\.[0-9]{1,100})?"
_TOKEN = re.compile(rf"\s*(?:({_OPERAND})|([-+*/()]))")
_SIGNED_OPERAND = re.compile(rf"-?{_OPERAND}")
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


def read_expression(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Return the exact value of an arithmetic expression and how often it uses each number, or None.

    An equation with a bare number on one side counts if it is true. Division by zero has no value. Time and
    memory are linear in the length, which the caller bounds; there is no recursion.

    >>> value, numbers = read_expression("(1 + 2) / 6"); value, sorted(numbers.elements())
    (Fraction(1, 2), [Fraction(1, 1), Fraction(2, 1), Fraction(6, 1)])
    >>> read_expression("2 + 2 = 5") is None, read_expression("2 **  3") is None
    (True, True)
    """
    sides = [side.strip() for side in _in_ascii(text).split("=")]
    if len(sides) > 2:
        return None
    if len(sides) == 2 and not _SIGNED_OPERAND.fullmatch(sides[1]):
        sides.reverse()
    read = _evaluate(sides[0])
    if read is None or len(sides) == 1:
        return read
    claimed = _SIGNED_OPERAND.fullmatch(sides[1])
    return read if claimed and Fraction(claimed[0]) == read[0] else None


def _in_ascii(text: str) -> str:
    text = text.strip().removesuffix(".")
    if text.startswith("**") and text.endswith("**"):
        text = text[2:-2]
    text = _THOUSANDS.sub("", _DRESS.sub("", _INNER_FRACTION.sub(r"((\1)/(\2))", text)))
    text = _TIMES.sub("*", text.replace(r"\div", "/")).translate(_OPERATORS)
    return _IMPLICIT.sub("*", text).strip()


def _evaluate(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Operator precedence with two stacks: the values so far, and the operators that wait for their second operand."""
    values: list[Fraction] = []
    waiting: list[str] = []
    numbers: Counter[Fraction] = Counter()
    position, wants_value = 0, True
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
        number, sign = token.groups()
        if wants_value != bool(number or sign == "(" or (sign == "-" and wants_value)):
            return None
        if number:
            values.append(Fraction(number))
            numbers[values[-1]] += 1
            wants_value = False
        elif wants_value:
            waiting.append("negate" if sign == "-" else sign)
        elif not _close(values, waiting, sign):
            return None
        else:
            wants_value = sign != ")"
    whole = not wants_value and _apply_from(values, waiting, 0) and not waiting
    return (values[0], numbers) if whole else None


def _close(values: list[Fraction], waiting: list[str], sign: str) -> bool:
    """Apply what binds at least as tightly as this operator, or back to the opening bracket; False: not valid."""
    if not _apply_from(values, waiting, _RANK.get(sign, 0)):
        return False
    if sign != ")":
        waiting.append(sign)
        return True
    return bool(waiting) and waiting.pop() == "("


def _apply_from(values: list[Fraction], waiting: list[str], rank: int) -> bool:
    while waiting and waiting[-1] != "(" and _RANK[waiting[-1]] >= rank:
        sign, last = waiting.pop(), values.pop()
        if sign == "/" and last == 0:
            return False
        values.append(-last if sign == "negate" else _APPLY[sign](values.pop(), last))
    return True
