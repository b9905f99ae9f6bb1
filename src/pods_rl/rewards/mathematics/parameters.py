r"""Read the set that a parameter of an answer runs through: `k \in \mathbb{Z}` of `\frac{k\pi}{2}, k \in \mathbb{Z}`.

The letter of the parameter does not count. All functions take texts in the notation of `plain`.
"""

from __future__ import annotations

import re

_CAPTURE = r"(?P<{}>[A-Za-z])"
_SETS = {"integer": "Z", "natural": "N", "real": "R", "rational": "Q", "whole": "N", "positive integer": "Z+"}
_KIND = r"(?P<{}>positive integer|integer|natural|real|rational|whole)s?(?: numbers?)?"
_JOINING_WORD = r"(?<![A-Za-z])(?:where|for|with|and|any|all|every|some|each)(?![A-Za-z])"
_JOIN = rf"(?:\s|,|;|\\(?:quad|qquad|forall|colon)(?![a-z])|{_JOINING_WORD}){{0,8}}"
_FORMS = (
    # k \in \mathbb{Z}
    _CAPTURE.format("a") + r"\s*\\in\s*\\mathbb\s*\{?\s*(?P<set>[ZNRQ])\s*\}?(?P<sign>\s*\^?\s*_?\s*\{?\s*[+*]\s*\}?)?",
    # k \in Z
    _CAPTURE.format("b") + r"\s*\\in\s*(?P<bare>[ZNRQ])",
    # k is an integer
    _CAPTURE.format("c") + r"\s+(?:is|be|being|in|are)?\s*(?:an?y?|the)?\s*" + _KIND.format("kind"),
    # for any integer k
    _KIND.format("first") + r"\s+" + _CAPTURE.format("d"),
)
_MEMBERSHIP = re.compile(rf"(?:,|;|\s|\\q?quad|(?=\()){_JOIN}\(?\s*(?:{'|'.join(_FORMS)})\s*[.)]?\s*$")
_INEQUALITY = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant|neq?)(?![a-z])")


def split_parameter(text: str) -> tuple[str, str, str] | None:
    r"""Return a text without the set of its parameter, the parameter and the set, or None.

    >>> split_parameter(r"\frac{k\pi}{2}, k\in\mathbb Z"), split_parameter("2n where n is an integer")
    (('\\frac{k\\pi}{2}', 'k', 'Z'), ('2n', 'n', 'Z'))
    >>> split_parameter(r"x \in \mathbb{R}") is None
    True
    """
    membership = _MEMBERSHIP.search(text)
    if membership is None:
        return None
    before = text[: membership.start()].rstrip(" ,;(")
    letter = next(filter(None, (membership[name] for name in "abcd")))
    if not before or not _letter(letter).search(before) or _INEQUALITY.search(before):  # x > 2, x \in \mathbb{Z}
        return None
    kind = membership["kind"] or membership["first"]
    values = _SETS[kind] if kind else membership["set"] or membership["bare"]
    if membership["sign"]:
        values += "+"
    return before, letter, values


def with_letter(text: str, letter: str, other: str) -> str:
    """Write another letter for a parameter, and not in the name of a command."""
    return _letter(letter).sub(other, text)


def _letter(letter: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\\)(?<![A-Za-z]){letter}(?![A-Za-z])|(?<=[0-9]){letter}(?![A-Za-z]{{2}})")
