"""Read numbers, in digits and in words, and arithmetic of numbers: exactly, never through a float or `eval`."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from .bounds import split_bound, split_bound_in_words
from .notation import is_asked_for, is_name

MAX_LENGTH = 1000  # maximum characters of an answer: bounds every pattern below
MAX_EXPONENT = 400  # 1e400 is beyond every answer; 1e999999999 would fill the memory

_UNSIGNED = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_PART = rf"(?:{_UNSIGNED})(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(
    rf"(?<![\w.,])(?P<sign>(?<![\w)])[+-])?(?:(?P<units>[0-9]+)\s+(?=[0-9]+\s*/))?"
    rf"(?P<top>{_PART})(?:\s*/\s*(?P<bottom>{_PART}))?"
)
_SIMPLE = r"-?[0-9.,]+"
_FRACTION = re.compile(
    rf"(?<![0-9])([0-9]+\s*|)\\[dtc]?frac\s*(?:\{{\s*({_SIMPLE})\s*\}}\s*\{{\s*({_SIMPLE})\s*\}}"
    rf"|([0-9])\s*([0-9])|([0-9])\s*\{{\s*({_SIMPLE})\s*\}}|\{{\s*({_SIMPLE})\s*\}}\s*([0-9]))(?![0-9.^_!{{])"
)
_PERCENT = re.compile(r"\s*(?:%|percent(?:age)?(?![a-z])|pct(?![a-z]))")
_SCALE = re.compile(r"\s*(dozen|hundred|thousand|million|billion|trillion)s?(?![a-z])")
_AND_SHARE = re.compile(r"\s+and\s+(?:(a|an|one)\s+(half|third|quarter)|(three)\s+(quarter)s)(?![a-z])")
_BELOW_ZERO = re.compile(r"(?<![A-Za-z])(?:below|under|(?:less|lower) than)\s+zero(?![A-Za-z])", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"(?<![\w.,])(?:0,[0-9]+|[0-9]+,(?:[0-9]{2}|[0-9]{4,}))(?![\w,]|\.[0-9])")

_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_LETTER = re.compile(r"(?!(?:st|nd|rd|th)\b)[A-Za-z]")  # right after a number
_BULLET = re.compile(r"\s*(?:[*•]|-(?=\s+[A-Za-z]))\s+")  # a dash before a number is its sign
_BESIDE_A_NUMBER = frozenset(" .,;:?")
_CHANGING = (
    "minus negative not half quarter third twice double triple squared cubed root over times plus hundred thousand "
    "million billion trillion dozen factorial sin cos tan cot sec csc log ln exp sqrt abs mod "
    "never neither nor cannot t false wrong incorrect "  # the t of isn't
    "january february march april may june july august september october november december am pm"
)
WORDS_THAT_CHANGE_A_NUMBER = frozenset(_CHANGING.split())

_CLAUSE = re.compile(r"[;,.]\s+|\n")
_SEVERAL = re.compile(r",(?![0-9]{3}(?![0-9]))|(?<![a-z])(?:and|or)(?![a-z])|[<>!]|\\(?:le|ge|lt|gt|ne|approx|pm)")
_UNIT_IN_SUM = re.compile(r"(?:/\s*|\bper\s+)?[A-Za-z]{2,}|\ba\s+(?=[a-z]{2})|%")

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_SPELT = {word: number for number, word in enumerate(_ONES.split())}
for _number, _ten in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2):
    _SPELT |= {_ten: 10 * _number} | {f"{_ten} {one}": 10 * _number + _SPELT[one] for one in _ONES.split()[1:10]}
for _word in ("a", *_ONES.split()[1:10]):
    _hundred = 100 * _SPELT.get(_word, 1)
    for _link in (" ", " and "):
        _SPELT |= {f"{_word} hundred{_link}{rest}": _hundred + _SPELT[rest] for rest in list(_SPELT)[1:100]}
    _SPELT[f"{_word} hundred"] = _hundred
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES_AFTER_DIGITS = _SCALES | {"dozen": 12, "hundred": 100}
_SHARES = {"half": 2, "third": 3, "quarter": 4}
_SHARES |= dict(zip(["fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], range(4, 11), strict=True))


class Number(NamedTuple):
    """An exact number; `percent` says that a percent sign followed it, `bound` that it is one ("at least 12": `>=`)."""

    value: Fraction
    percent: bool = False
    bound: str = ""

    def equals(self, other: Number) -> bool:
        """Compare exactly; 50% equals both 50 and 0.5, since datasets write either. Bounds must be the same.

        >>> Number(Fraction(50), percent=True).equals(Number(Fraction(1, 2)))
        True
        >>> Number(Fraction(12), bound=">=").equals(Number(Fraction(12)))
        False
        """
        same = self.value == other.value or self.fraction == other.fraction
        return same and self.bound == other.bound

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
    text = _FRACTION.sub(_inline_fraction, text).strip()
    match = _NUMBER.match(text)
    if match is None:
        return None
    percent = _PERCENT.match(text, match.end())
    return _value(match, percent=bool(percent)) if (percent or match).end() == len(text) else None


def read_number_in_words(text: str, *, asked_for: bool = False) -> Number | None:
    """Read the only number of a `plain` text with words around it ("18 dollars a day") or in words, or return None.

    Two numbers give None, so that a list of guesses never scores. Single letters may be variables and words
    such as "twice" change the number: both give None. "at least 12" is a bound (`Number.bound`). Of an equation, the
    right side is read if the left side is a name, or arithmetic that is true; if `asked_for`, also if it combines
    names as questions do (`m+n = 37`).

    >>> read_number_in_words("9 * 2 = 18 dollars").value, read_number_in_words("17 or 18") is None
    (Fraction(18, 1), True)
    >>> read_number_in_words("x = 18").value, read_number_in_words("2x = 18"), read_number_in_words("9 * 3 = 18")
    (Fraction(18, 1), None, None)
    >>> read_number_in_words("m+n = 37"), read_number_in_words("m+n = 37", asked_for=True).value
    (None, Fraction(37, 1))
    >>> read_number_in_words("2.5 million").value == 2_500_000, read_number_in_words("negative twenty-one").value
    (True, Fraction(-21, 1))
    >>> read_number_in_words("at least 12 eggs").bound, read_number_in_words("all but 12") is None
    ('>=', True)
    """
    if "=" in text:
        text = _right_side(text, asked_for=asked_for)
    text = _FRACTION.sub(_inline_fraction, _DECIMAL_COMMA.sub(lambda found: found[0].replace(",", "."), text))
    match = _NUMBER.search(text)
    if match is None:
        return _spelt(text)
    before, after = text[: match.start()], text[match.end() :]
    if (match[0] + after[:2]).endswith(".."):  # 42... may go on
        return None
    percent = _PERCENT.match(after)
    ending = percent or _SCALE.match(after) or _AND_SHARE.match(after)
    rest = after[ending.end() if ending else after.startswith("-") :]
    around = split_bound(_BULLET.sub("", before, count=1), rest)
    if around is None or _LETTER.match(after) or re.match(r"-(?![A-Za-z]{2})", after):
        return None
    bound, before, rest = around
    below_zero = _BELOW_ZERO.search(rest)
    words_around = f"{before} {_BELOW_ZERO.sub('', rest)}"
    if not set(_WORD.sub("", words_around)) <= _BESIDE_A_NUMBER:
        return None
    if may_change(_WORD.findall(words_around), WORDS_THAT_CHANGE_A_NUMBER):
        return None
    number = _value(match, percent=bool(percent))
    if number is None:
        return None
    value = _with_ending(number.value, ending)
    return number._replace(value=-abs(value) if below_zero else value, bound=bound)


def _with_ending(value: Fraction, ending: re.Match[str] | None) -> Fraction:
    """The value of a number with the word after it: "2 dozen", "1 and a half"."""
    if ending is None or ending.re is _PERCENT:
        return value
    if ending.re is _SCALE:
        return value * _SCALES_AFTER_DIGITS[ending[1]]
    share = Fraction(3, 4) if ending[3] else Fraction(1, _SHARES[ending[2]])
    return value - share if value < 0 else value + share


def may_change(words: Sequence[str], changing: frozenset[str]) -> bool:
    """Whether one of the words around a number or a formula changes it, or may be a variable (a single letter).

    >>> may_change(["a", "half"], WORDS_THAT_CHANGE_A_NUMBER), may_change(["a", "day"], WORDS_THAT_CHANGE_A_NUMBER)
    (True, False)
    """
    parts = {part for word in words for part in re.split("['’-]", word.lower())}
    return bool(parts & changing) or any(len(word) == 1 and word not in "aAI" for word in words)


_SIGN_IN_WORDS = re.compile(r"\s*(?:([-+])|(?:an? )?(?:negative|minus|neg\.?)(?=\s))\s*", re.IGNORECASE)
_HALF_OF = re.compile(r"(?:(?:a|one) )?half(?: (an?)(?= [a-z]))?(?= |$)")


def _spelt(text: str) -> Number | None:
    """Read a number in words, with at most two other words after it: "one hundred and five eggs", "two thirds"."""
    bound, text = split_bound_in_words(text)
    sign = _SIGN_IN_WORDS.match(text)
    if sign:
        text = text[sign.end() :]
    below_zero = _BELOW_ZERO.search(text)
    if below_zero:
        text = text[: below_zero.start()] + text[below_zero.end() :]
    words = text.lower().replace("-", " ").strip(" .,").split()
    read = _read_half(words) or _read_count(words)
    if read is None:
        return None
    value, rest = read
    if rest[:1] == ["dozen"]:
        value *= 12
        rest = rest[1:]
    for word in rest:
        if not word.isalpha() or word in _SPELT or word in _SCALES or word in ("and", "or", "to"):
            return None
    if len(rest) > 2 or may_change(rest, WORDS_THAT_CHANGE_A_NUMBER):
        return None
    negative = below_zero is not None or (sign is not None and sign[1] != "+")
    return Number(-value if negative else value, bound=bound)


def _read_half(words: list[str]) -> tuple[Fraction, list[str]] | None:
    """Read "half", "a half", "half an hour", "half a dozen" and "half a million". "half of 18" is not a number."""
    half = _HALF_OF.match(" ".join(words))
    if half is None:
        return None
    rest = words[len(half[0].split()) :]
    if rest[:1] and rest[0] in _SCALES:
        return Fraction(_SCALES[rest[0]], 2), rest[1:]
    if rest and rest[0] != "dozen" and not (half[1] and len(rest) == 1):
        return None
    return Fraction(1, 2), rest


def _read_count(words: list[str]) -> tuple[Fraction, list[str]] | None:
    """Read a count or a fraction in words, and return it with the words after it."""
    words = _with_one(words)
    total = 0
    at = 0
    scale = 0
    while scale != 1:
        size = _spelt_words(words[at:])
        if size == 0:
            break
        number = _SPELT[" ".join(words[at : at + size])]
        at += size
        scale = _SCALES.get(words[at], 1) if at < len(words) else 1
        total += number * scale
        if scale > 1:
            at += 1
            if words[at : at + 1] == ["and"] and words[at + 1 : at + 2] != ["a"]:  # one thousand and five
                at += 1
    if scale == 0:
        return None
    return _with_share(total, words[at:])


def _with_one(words: list[str]) -> list[str]:
    """Write "one" for the article of "a thousand", "a dozen" and "a third", and before "dozen"."""
    if words[:1] == ["dozen"]:
        return ["one", *words]
    counted = words[1:2]
    if words[:1] != ["a"] or not counted:
        return words
    if counted[0] in _SCALES or counted == ["dozen"] or words[1:] in (["third"], ["quarter"]):
        return ["one", *words[1:]]
    return words


def _spelt_words(words: list[str]) -> int:
    """How many of the first words are one number below a thousand; 0 if none is."""
    for size in range(min(5, len(words)), 0, -1):
        if " ".join(words[:size]) in _SPELT:
            return size
    return 0


def _with_share(count: int, rest: list[str]) -> tuple[Fraction, list[str]]:
    """Read the share after a count: "two thirds", "two and a half"."""
    if len(rest) == 1:
        bottom = _share(rest[0])
        if bottom:
            return Fraction(count, bottom), []
    if rest[:1] == ["and"] and len(rest) > 2:
        top = 1 if rest[1] in ("a", "an") else _SPELT.get(rest[1])
        bottom = _share(rest[2])
        if top and bottom and top < bottom:
            return count + Fraction(top, bottom), rest[3:]
    return Fraction(count), rest


def _share(word: str) -> int | None:
    """The denominator that a word names: 3 of "third" and "thirds"."""
    return _SHARES.get(word) or _SHARES.get(word.removesuffix("s"))


def _right_side(text: str, *, asked_for: bool) -> str:
    """The right side of an equation that states a value (`x = 5`) or is true arithmetic, else an empty text."""
    *earlier, last = _CLAUSE.split(text)
    *left, right = last.split("=")
    if not left or _SEVERAL.search(last) or not all(map(_is_true, earlier)):
        return ""
    if asked_for and len(left) == 1 and is_asked_for(right):  # 37 = m+n
        left, right = [right], left[0]
    states = is_name(left[0]) or (asked_for and is_asked_for(left[0]))
    named = states and not earlier and not any(map(is_name, left[1:]))
    return right if named or _is_true(last) else ""


def _is_true(equation: str) -> bool:
    """Whether worked arithmetic has the same value on every side; words around it do not count."""
    sides = [_UNIT_IN_SUM.sub(" ", side) for side in equation.rpartition(":")[2].split("=")]
    values = {read[0] if (read := read_expression(side)) else None for side in sides}
    return len(sides) > 1 and len(values) == 1 and None not in values


def _inline_fraction(match: re.Match[str]) -> str:
    units, top, bottom = (part for part in match.groups() if part is not None)
    return f"{units} {top}/{bottom}" if units else f"{top}/{bottom}"


def _value(match: re.Match[str], *, percent: bool) -> Number | None:
    value, bottom = _exact(match["top"]), match["bottom"]
    if value is not None and bottom:
        divisor = _exact(bottom)
        value = value / divisor if divisor else None
    if value is None:
        return None
    value += int(match["units"] or 0)
    return Number(-value if (match["sign"] or "").startswith("-") else value, percent)


def _exact(part: str) -> Fraction | None:
    if len(part) > MAX_LENGTH:
        return None
    mantissa, _, exponent = part.replace(",", "").lower().partition("e")
    if not exponent:
        return Fraction(int(mantissa) if mantissa.isdigit() else mantissa)
    return Fraction(mantissa) * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MAX_EXPONENT else None


_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DRESS = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ()\[\]]|[$`]")
_TIMES = re.compile(r"\\(?:times|cdot)(?![a-z])|(?<=[0-9)\s])[xX](?=[0-9(\s])")
_OPERATORS = str.maketrans("×·∗÷∶−–[]{}", "***//--()()")
_IMPLICIT = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_OPERAND = re.compile(r"[0-9]{1,100}(?:\.[0-9]{1,100})?")
_SIGNED_OPERAND = re.compile(rf"-?{_OPERAND.pattern}")
_ARITHMETIC = re.compile(rf"{_OPERAND.pattern}|[-+*/()]")
_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")  # before a number; Python has no such numbers
_APPLY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def read_expression(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Return the exact value of an arithmetic expression and how often it uses each number, or None.

    An equation with a bare number on one side counts if it is true. Division by zero has no value. The caller
    bounds the length of the text.

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
    text = _THOUSANDS.sub("", _DRESS.sub("", _LATEX_FRACTION.sub(r"((\1)/(\2))", text)))
    text = _TIMES.sub("*", text.replace(r"\div", "/")).translate(_OPERATORS)
    return _IMPLICIT.sub("*", text).strip()


def _evaluate(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Evaluate numbers and operators as Python reads them, but exactly."""
    if "".join(_ARITHMETIC.findall(text)) != "".join(text.split()):
        return None
    text = _ZEROS.sub("", text)
    numbers: Counter[Fraction] = Counter()

    def work_out(part: ast.AST) -> Fraction:
        if isinstance(part, ast.BinOp):
            return _APPLY[type(part.op)](work_out(part.left), work_out(part.right))
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
            return -work_out(part.operand)
        if not isinstance(part, ast.Constant):
            raise ValueError(part)
        number = Fraction(text[part.col_offset : part.end_col_offset])
        numbers[number] += 1
        return number

    try:
        return work_out(ast.parse(text, mode="eval").body), numbers
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
