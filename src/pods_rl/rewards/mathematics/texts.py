"""Compare lists of words: `I and III` is `I, III`."""

from __future__ import annotations

import re

_BETWEEN_ITEMS = re.compile(r"\s*(?:,\s*(?:and\s+|&\s*)?|\s(?:and|&)\s+)")
_ITEM = re.compile(r"[A-Za-z][A-Za-z' -]*")
_STATEMENT_NUMBER = re.compile(r"(?=[IVX])X{0,3}(?:IX|IV|V?I{0,3})")
_ONLY = re.compile(r"\s+only$|^only\s+", re.IGNORECASE)


def same_items(answer: str, gold: str) -> bool:
    """Whether both are lists with the same words; Roman numerals, which number statements, may come in any order.

    >>> same_items("I and III", "I, III"), same_items("III, I", "I and III"), same_items("I, II", "I, III")
    (True, True, False)
    >>> same_items("red and blue", "red, blue"), same_items("blue, red", "red, blue")
    (True, False)
    """
    answer_items = _items(answer)
    gold_items = _items(gold)
    if len(gold_items) < 2 or len(answer_items) != len(gold_items):
        return False
    if all(_STATEMENT_NUMBER.fullmatch(item) for item in gold_items):
        return sorted(answer_items) == sorted(gold_items)
    return all(map(_same_item, answer_items, gold_items))


def _same_item(answer: str, gold: str) -> bool:
    if len(gold) == 1:  # a letter may be a variable
        return answer == gold
    return answer.casefold() == gold.casefold()


def _items(text: str) -> list[str]:
    """Return the items of a list of words, or nothing if it is not one."""
    items = _BETWEEN_ITEMS.split(_ONLY.sub("", text.strip()))
    if not all(map(_ITEM.fullmatch, items)):
        return []
    return items
