"""A sequence in the right order, scored by position."""

from __future__ import annotations

import re

from .extract import extract_answer

_BETWEEN = re.compile(r"[\s,;|<>(){}\[\]→]+")
_DRESS = re.compile(r"\\(?:left|right|text|quad|langle|rangle)(?![a-z])|\\[,;:! {}]|->|[$`*'\"]")
MAX_LENGTH = 20_000  # characters of an answer that are read


def positions(text: str, gold: str) -> float:
    """Give the share of positions at which the final answer of `text` has the item that `gold` has there.

    Source: arXiv 2504.13818 asks for verifiable rewards; this one is graded, so that max-variance has more than two
    values to choose from. Range [0, 1].

    `text` is a completion, its answer found by `extract_answer`; `gold` holds the items in order, separated by
    spaces. Commas, semicolons, arrows and brackets may separate an answer's items too; words count in any case. The
    share is of the longer of the two, so that 1.0 means the very sequence. An answer that has more than a quarter of
    the gold items too many or too few (one is always allowed) scores 0.0.

    >>> positions("<answer>[1, 2, 4, 3]</answer>", "1 2 3 4"), positions("<answer>1 2 3</answer>", "1 2 3 4")
    (0.5, 0.75)
    >>> positions("<answer>1</answer>", "1 2 3 4")
    0.0
    """
    answer = extract_answer(text)
    if answer is None or len(answer) > MAX_LENGTH:
        return 0.0
    found, wanted = _items(answer), _items(gold)
    if not wanted or abs(len(found) - len(wanted)) > max(1, len(wanted) // 4):
        return 0.0
    right = sum(mine == theirs for mine, theirs in zip(found, wanted, strict=False))
    return right / max(len(found), len(wanted))


def _items(text: str) -> list[str]:
    text = _DRESS.sub(" ", text.strip().removesuffix("."))
    return [item.casefold() for item in _BETWEEN.split(text) if item]
