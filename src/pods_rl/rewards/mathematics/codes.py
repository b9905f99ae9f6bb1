"""Compare codes to the sign: ranges, scores, dates and numbers in groups (`10-12`, `2024-05-01`), and capitals (`BCA`).

Read as mathematics, `10-12` would be -2 and `BCA` a product in any order. All functions take texts in the notation of
`plain`, of at most `numerals.MAX_LENGTH` characters.
"""

from __future__ import annotations

import re

from .bounds import split_bound
from .molecules import is_formula
from .words import WORDS_THAT_CHANGE_A_NUMBER, may_change

_GROUP = r"[0-9]+(?:[.,:][0-9]+)*"  # 10, 2.5, 1,000, 10:30
_GROUPS = re.compile(
    rf"(?<![\w.,:/^_\\-])(?P<groups>{_GROUP}(?:%?\s*-{{1,3}}\s*{_GROUP})*%?\s*-{{1,3}}\s*(?:{_GROUP}|[0-9]*X)"  # 10-12
    rf"|{_GROUP}(?:\s*/\s*{_GROUP}){{2,}})(?![\w^!(\[{{/]|\.[0-9])"  # 10/5/2020
)
_SEPARATOR = re.compile(r"%?\s*(-{1,3}|/)\s*")
_WORDS_AROUND = re.compile(r"[A-Za-z]+")
_AROUND_A_CODE = frozenset(" .,;:?%")
_RANGE_IN_WORDS = (
    (re.compile(r"(?<=[0-9%])\s*(?<![A-Za-z])(?:to|through|until)(?![A-Za-z])\s*(?=[0-9])"), "-"),  # 10 to 12
    (re.compile(rf"\bbetween\s+({_GROUP}%?)\s+and\s+(?=[0-9])"), r"\1-"),  # between 10 and 12
)
_HOURS = frozenset(("am", "pm"))

_VOWEL = re.compile("[AEIOUY]")  # of a word, whose case does not count
_THOUSANDS_COMMA = re.compile(r",(?=[0-9]{3}(?![0-9]))")
_CAPITALS = re.compile(r"[A-Z0-9]+|[A-Z](?:\s*-\s*[A-Z]){2,}|[A-Z][a-z]?[A-Z0-9]*-[0-9]+[A-Z]?")  # BCA, 2B, A-C-B, F-16
_BETWEEN_CODES = re.compile(r",(?![0-9]{3}(?![0-9]))\s*(?:and\s+)?|;\s*|\s+(?:and|or)\s+")


def compare_codes(answer: str, gold: str, written_gold: str) -> bool | None:
    """Whether an answer is the same code as a gold answer, or None if the gold answer is not a code.

    >>> compare_codes("10 to 12", "10-12", "10-12"), compare_codes("-2", "10-12", "10-12")
    (True, False)
    >>> compare_codes("ACB", "BCA", "BCA"), compare_codes("ba", "ab", "ab")
    (False, None)
    """
    golds = _BETWEEN_CODES.split(gold)
    if len(golds) > 1:
        answers = _BETWEEN_CODES.split(answer)
        verdicts = [compare_codes(one, other, written_gold) for one, other in zip(answers, golds, strict=False)]
        if None not in (compare_codes(code, code, written_gold) for code in golds):
            return len(answers) == len(golds) and all(verdicts)
        return None
    groups = _groups(gold)
    if groups:
        for pattern, joined in _RANGE_IN_WORDS:
            answer = pattern.sub(joined, answer)
        answer_groups = _groups(answer)
        return answer_groups is not None and _same_groups(answer_groups, groups)
    if is_in_capitals(gold) and "$" not in written_gold:
        answer = "".join(answer.split())
        gold = "".join(gold.split())
        if gold.isalpha() and _VOWEL.search(gold):
            return answer.casefold() == gold.casefold()
        return answer == gold
    return None


def is_in_capitals(text: str) -> bool:
    """Whether a text is three or more capitals, also joined by hyphens, or capitals and digits, and not a formula."""
    if not _CAPITALS.fullmatch(text) or is_formula(text):
        return False
    capitals = sum(sign.isupper() for sign in text)
    return capitals > 2 or 0 < capitals < len(text)


def _groups(text: str) -> list[str] | None:
    """Return the groups and the signs between them, or None unless a text has one code and only words around it."""
    code = _GROUPS.search(text)
    if code is None:
        return None
    before = text[: code.start()]
    after = text[code.end() :]
    around = f"{before} {after}"
    if not set(_WORDS_AROUND.sub("", around)) <= _AROUND_A_CODE or split_bound(before, after) != ("", before, after):
        return None
    if may_change(_WORDS_AROUND.findall(around), WORDS_THAT_CHANGE_A_NUMBER - _HOURS):
        return None
    return [part[:1] if part.startswith("-") else part for part in _SEPARATOR.split(code["groups"])]


def _same_groups(one: list[str], other: list[str]) -> bool:
    """Whether groups are the same; a zero before a digit of a date does not count, and neither does its separator."""
    if len(one) != len(other):
        return False
    if len(one) == 3 and one[1] != other[1]:
        return False
    return all(_same_group(a, b) for a, b in zip(one[::2], other[::2], strict=True))


def _same_group(one: str, other: str) -> bool:
    if max(len(one), len(other)) <= 2 and one.isdigit() and other.isdigit():
        return int(one) == int(other)
    return _THOUSANDS_COMMA.sub("", one) == _THOUSANDS_COMMA.sub("", other)
