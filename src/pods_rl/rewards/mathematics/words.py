"""Read a number with words around it ("18 dollars a day"), in words ("twenty-one") or at the end of an equation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from .arithmetic import read_expression
from .bounds import split_bound, split_bound_in_words
from .names import is_asked_for, is_name
from .notation import GREEK
from .numerals import NUMBER, PERCENT, Number, inline_fractions, number_of, read_number

_SCALED = re.compile(  # 2.5 million, 5\text{ million}
    r"(?<![\w.,^/{])([0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?)((?:[\s~-]|\\[ ,;:]|\\text\{){0,9})"
    r"(dozen|hundred|thousand|million|billion|trillion)s?(?![A-Za-z])"
)
_ABOUT = re.compile(r"^\\approx(?![A-Za-z])")  # \approx 18 is about 18
_SAID_TWICE = re.compile(r"([^()]*[^()\s])\s*\(([^()]+)\)([^()]*)")  # 5 (five)
_AND_SHARE = re.compile(
    r"\s+and\s+(?:(a|an|one)\s+(half|third|quarter)"  # of 1 and a half
    r"|(three)\s+(quarter)s)(?![a-z])"  # of 1 and three quarters
)
_BELOW_ZERO = re.compile(r"(?<![A-Za-z])(?:below|under|(?:less|lower) than)\s+zero(?![A-Za-z])", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(
    r"(?<![\w.,])(?:0,[0-9]+"  # 0,125
    r"|[0-9]+,(?:[0-9]{2}|[0-9]{4,}))(?![\w,]|\.[0-9])"  # 3,14 and 3,1415, but not 3,141
)
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")  # day, well-known
_LETTER = re.compile(r"(?!(?:st|nd|rd|th)\b)[A-Za-z]")  # the x of 2x, not the th of 5th
_DASH_AFTER = re.compile(r"-(?![A-Za-z]{2})")  # of 5-3, not of 5-year
_BULLET = re.compile(r"\s*(?:[*•]|-(?=\s+[A-Za-z]))\s+")  # a dash before a number is its sign
_PUNCTUATION = frozenset(" .,;:?")
_CHANGING = (
    "minus negative not half quarter third twice double triple squared cubed root over times plus hundred thousand "
    "million billion trillion dozen factorial sin cos tan cot sec csc log ln exp sqrt abs mod "
    "never neither nor cannot t false wrong incorrect "  # the t of isn't
    "infinity infty inf hbar ell "  # constants
    "if unless provided providing assuming supposing depends depending except "  # 12 if it rains
    "disagree reject rejected refuse deny denied disregard ignore forget dismiss doubt retract impossible invalid "
    "unlikely doubtful untrue mistaken mistake erroneous extraneous inaccurate fails too "
    "divided multiplied halved doubled tripled quadrupled reduced decreased diminished subtracted deducted "
    "january february march april may june july august september october november december am pm"
)
# The names of Greek letters are constants, of which psi may be a unit.
WORDS_THAT_CHANGE_A_NUMBER = frozenset((*_CHANGING.split(), *GREEK.lower().split(), "pi")) - {"psi"}

_CLAUSE = re.compile(r"[;,.]\s+|\n")  # ends a clause: "9 * 2 = 18, x = 5"
_SEVERAL = re.compile(
    r",(?![0-9]{3}(?![0-9]))"  # 1, 2
    r"|(?<![a-z])(?:and|or)(?![a-z])"  # 1 or 2
    r"|[<>!]|\\(?:le|ge|lt|gt|ne|approx|pm)"  # x < 2
)
_UNIT_IN_SUM = re.compile(r"(?:/\s*|\bper\s+)?[A-Za-z]{2,}|\ba\s+(?=[a-z]{2})|%")  # per day, a day

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES_AFTER_DIGITS = _SCALES | {"dozen": 12, "hundred": 100}
_SHARES = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10,
}  # fmt: skip
_SPELT_SIGN = re.compile(r"\s*(?:([-+])|(?:an? )?(?:negative|minus|neg\.?)(?=\s))\s*", re.IGNORECASE)
_HALF_OF = re.compile(r"(?:(?:a|one) )?half(?: (an?)(?= [a-z]))?(?= |$)")  # half, a half, half an (hour)


_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)


def _spelt_numbers() -> dict[str, int]:
    """Return the numbers below a thousand by their spellings, "a hundred" and "one hundred and five" among them."""
    below_twenty = _BELOW_TWENTY.split()
    digits = below_twenty[1:10]
    spelt = {word: number for number, word in enumerate(below_twenty)}
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    for number, ten in enumerate(tens, 2):
        spelt[ten] = 10 * number
        for digit in digits:
            spelt[f"{ten} {digit}"] = 10 * number + spelt[digit]
    below_hundred = {word: number for word, number in spelt.items() if number > 0}
    for word in ("a", *digits):
        hundreds = 100 * spelt.get(word, 1)
        spelt[f"{word} hundred"] = hundreds
        for rest, number in below_hundred.items():
            spelt[f"{word} hundred {rest}"] = hundreds + number
            spelt[f"{word} hundred and {rest}"] = hundreds + number
    return spelt


_SPELT = _spelt_numbers()
_LONGEST_SPELT = 5  # words: one hundred and twenty one


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
    >>> read_number_in_words("negative twenty-one").value, read_number_in_words("5 (five)").value
    (Fraction(-21, 1), Fraction(5, 1))
    >>> read_number_in_words("at least 12 eggs").bound, read_number_in_words("all but 12") is None
    ('>=', True)
    """
    text = _said_once(_ABOUT.sub("", text))
    if "=" in text:
        text = _right_side(text, asked_for=asked_for)
    text = _DECIMAL_COMMA.sub(lambda decimal: decimal[0].replace(",", "."), text)
    text = inline_fractions(text)
    match = NUMBER.search(text)
    if match is None:
        return _read_spelt(text)
    before = text[: match.start()]
    after = text[match.end() :]
    if (match[0] + after[:2]).endswith(".."):  # 42... may go on
        return None
    if _LETTER.match(after) or _DASH_AFTER.match(after):
        return None
    percent = PERCENT.match(after)
    ending = percent or _AND_SHARE.match(after)
    rest = after[ending.end() :] if ending else after.removeprefix("-")  # 5-year
    rest = rest.replace("left over", "left")  # 6 eggs left over, but not "6 over 2"
    around = split_bound(_BULLET.sub("", before, count=1), rest)
    if around is None:
        return None
    bound, before, rest = around
    words_around = f"{before} {_BELOW_ZERO.sub('', rest)}"
    if not set(_WORD.sub("", words_around)) <= _PUNCTUATION:
        return None
    if may_change(_WORD.findall(words_around), WORDS_THAT_CHANGE_A_NUMBER):
        return None
    number = number_of(match, percent=bool(percent))
    if number is None:
        return None
    value = _with_ending(number.value, ending)
    if _BELOW_ZERO.search(rest):
        value = -abs(value)
    return number._replace(value=value, bound=bound)


def _said_once(text: str) -> str:
    """Drop a number in brackets that repeats the number before it, one in digits and one in words: `5 (five)`."""
    twice = _SAID_TWICE.fullmatch(text)
    if twice is None:
        return text
    before, within, after = twice.groups()
    in_figures = [read_number(side) for side in (before, within)]
    if (in_figures[0] or read_number_in_words(before)) != (in_figures[1] or read_number_in_words(within)):
        return text
    return before + after if in_figures.count(None) == 1 else text


def in_digits(text: str) -> str:
    """Write numbers in digits where a word scales them: `2 dozen eggs` as `24  eggs`."""
    return _SCALED.sub(_scaled, text)


def _scaled(scaled: re.Match[str]) -> str:
    number, between, scale = scaled.groups()
    try:
        value = Fraction(number.replace(",", "")) * _SCALES_AFTER_DIGITS[scale]
    except (ValueError, ZeroDivisionError):  # 2.5/3 million
        return scaled[0]
    return f"{value}{between.replace('-', ' ')}"


def _with_ending(value: Fraction, ending: re.Match[str] | None) -> Fraction:
    """Return the value of a number with the words after it: "1 and a half"."""
    if ending is None or ending.re is PERCENT:
        return value
    share = Fraction(3, 4) if ending[3] else Fraction(1, _SHARES[ending[2]])
    if value < 0:
        return value - share
    return value + share


def may_change(words: Sequence[str], changing: frozenset[str]) -> bool:
    """Whether one of the words around a number or a formula changes it, or may be a variable (a single letter).

    >>> may_change(["a", "half"], WORDS_THAT_CHANGE_A_NUMBER), may_change(["a", "day"], WORDS_THAT_CHANGE_A_NUMBER)
    (True, False)
    """
    for word in words:
        if len(word) == 1 and word not in "aAI":
            return True
        if not changing.isdisjoint(re.split("['’-]", word.lower())):
            return True
    return False


# -- numbers in words --------------------------------------------------------------------------------------------------


def _read_spelt(text: str) -> Number | None:
    """Read a number in words with at most two words after it: "one hundred and five eggs", "two thirds"."""
    bound, text = split_bound_in_words(text)
    sign = _SPELT_SIGN.match(text)
    if sign:
        text = text[sign.end() :]
    below_zero = _BELOW_ZERO.search(text)
    if below_zero:
        text = text[: below_zero.start()] + text[below_zero.end() :]
    words = text.lower().replace("-", " ").strip(" .,").split()
    value_and_rest = _read_half(words) or _read_count(words)
    if value_and_rest is None:
        return None
    value, rest = value_and_rest
    if rest[:1] == ["dozen"]:
        value *= 12
        rest = rest[1:]
    if len(rest) > 2 or any(map(_is_part_of_a_number, rest)) or may_change(rest, WORDS_THAT_CHANGE_A_NUMBER):
        return None
    if below_zero or (sign and sign[1] != "+"):
        value = -value
    return Number(value, bound=bound)


def _is_part_of_a_number(word: str) -> bool:
    """Whether a word after a number may belong to it or to another one, so that neither is certain."""
    return not word.isalpha() or word in _SPELT or word in _SCALES or word in ("and", "or", "to")


def _read_half(words: list[str]) -> tuple[Fraction, list[str]] | None:
    """Read "half", "a half", "half an hour", "half a dozen" and "half a million". "half of 18" is not a number."""
    half = _HALF_OF.match(" ".join(words))
    if half is None:
        return None
    rest = words[len(half[0].split()) :]
    if rest and rest[0] in _SCALES:
        return Fraction(_SCALES[rest[0]], 2), rest[1:]
    half_of_one_thing = bool(half[1]) and len(rest) == 1  # half an hour
    if rest and rest[0] != "dozen" and not half_of_one_thing:
        return None
    return Fraction(1, 2), rest


def _read_count(words: list[str]) -> tuple[Fraction, list[str]] | None:
    """Read a count or a fraction in words, and return it with the words after it."""
    words = _with_one(words)
    total = 0
    position = 0
    while True:
        size = _spelt_words(words[position:])
        if size == 0:
            break
        number = _SPELT[" ".join(words[position : position + size])]
        position += size
        scale = _SCALES.get(words[position]) if position < len(words) else None
        if scale is None:  # the last part: five of two thousand and five
            total += number
            break
        total += number * scale
        position += 1
        if words[position : position + 1] == ["and"] and words[position + 1 : position + 2] != ["a"]:
            position += 1  # one thousand and five, but not one million and a half
    if position == 0:
        return None
    return _with_share(total, words[position:])


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
    """Return the number of first words that are one number below a thousand, or 0."""
    for size in range(min(_LONGEST_SPELT, len(words)), 0, -1):
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
    """Return the denominator that a word names: 3 for "third" and "thirds"."""
    return _SHARES.get(word) or _SHARES.get(word.removesuffix("s"))


# -- equations ---------------------------------------------------------------------------------------------------------


def _right_side(text: str, *, asked_for: bool) -> str:
    """Return the right side of an equation that states a value (`x = 5`) or is true arithmetic, else an empty text."""
    *earlier, last = _CLAUSE.split(text)
    *left, right = last.split("=")
    if not left or _SEVERAL.search(last) or not all(map(_is_true, earlier)):
        return ""
    if asked_for and len(left) == 1 and is_asked_for(right):  # 37 = m+n
        name = right
        right = left[0]
        left = [name]
    states_a_value = is_name(left[0]) or (asked_for and is_asked_for(left[0]))
    if states_a_value and not earlier and not any(map(is_name, left[1:])):
        return right
    if _is_true(last):
        return right
    return ""


def _is_true(equation: str) -> bool:
    """Whether worked arithmetic has the same value on every side; words around it do not count."""
    _, _, equation = equation.rpartition(":")
    sides = equation.split("=")
    if len(sides) < 2:
        return False
    values = set()
    for side in sides:
        result = read_expression(_UNIT_IN_SUM.sub(" ", side))
        if result is None:
            return False
        values.add(result)
    return len(values) == 1
