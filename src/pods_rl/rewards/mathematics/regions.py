r"""Compare answers as sets of real numbers: `x < 3` is `(-\infty, 3)`. Runs in a verifier process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import sympy

from .structure import BRACKETS, Node, named
from .values import value, values_of

_STANDARD_SETS = {
    r"\mathbb{R}": sympy.S.Reals, r"\mathbb{Z}": sympy.S.Integers, r"\mathbb{N}": sympy.S.Naturals,
    r"\mathbb{Q}": sympy.S.Rationals, r"\emptyset": sympy.S.EmptySet, r"\varnothing": sympy.S.EmptySet,
    r"\{\}": sympy.S.EmptySet,
}  # fmt: skip
_RELATIONS_OF_SYMPY: dict[str, Callable[..., Any]] = {
    "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "!=": sympy.Ne, "=": sympy.Eq,
}  # fmt: skip


def same_set(gold: Node, answer: Node) -> bool:
    """Whether two answers are the same set of real numbers, if both are more than a list."""
    if not is_region(gold) or not is_region(answer) or len(_variables(gold) | _variables(answer)) > 1:
        return False
    gold_set = _set(gold)
    answer_set = _set(answer)
    if gold_set is None or answer_set is None:
        return False
    return bool(gold_set == answer_set or gold_set.symmetric_difference(answer_set).is_empty)


def is_region(node: Node) -> bool:
    """Whether an answer stands for a set: an interval, an inequality, a union, not a number or a list of numbers."""
    if node.kind == "value":
        return "".join(node.text.split()) in _STANDARD_SETS
    if node.kind == "relation":
        return not node.equation or "in" in node.signs
    if node.kind in (*BRACKETS, "set", "union", "minus", "cap"):
        return True
    return any(item.kind != "()" and is_region(item) for item in node.items)  # (1,4), (2,3) are two points


def _variables(node: Node) -> set[str]:
    """Return the names of the variables that a region restricts."""
    names: set[str] = set()
    if node.kind != "relation":
        for item in node.items:
            names |= _variables(item)
        return names
    name = named(node)
    if name is not None:
        return {name}
    for side in values_of(node.items) or ():
        names.update(map(str, side.free_symbols))
    return names


def _set(node: Node) -> Any:
    """Return the set of SymPy that an answer stands for, or None."""
    if node.kind == "relation":
        return _of_relation(node)
    if node.kind == "value":
        return _of_value(node.text)
    if node.kind in BRACKETS:
        return _of_interval(node) if len(node.items) == 2 else None
    if node.kind == "set" and any(map(is_region, node.items)):
        return None
    parts = [_set(item) for item in node.items]
    if any(part is None for part in parts):
        return None
    if node.kind == "minus":
        return sympy.Complement(*parts)
    if node.kind == "cap":
        return sympy.Intersection(*parts)
    if node.kind in ("and", "or", "list"):
        return _of_list(node, parts)
    return sympy.Union(*parts)


def _of_list(node: Node, parts: Sequence[Any]) -> Any:
    r"""Return the set of a list, or None if an item adds nothing, or is the only relation: `[0,\infty), 9`."""
    are_relations = {item.kind == "relation" for item in node.items}
    if len(are_relations) > 1:
        return None
    if node.kind != "or" and True in are_relations:
        together = sympy.Intersection(*parts)
        # x < 1, x > 2 means either, since no number is both
        if node.kind == "and" or not together.is_empty:
            return together
    for i, part in enumerate(parts):
        if part.is_subset(sympy.Union(*parts[:i], *parts[i + 1 :])) is not False:
            return None
    return sympy.Union(*parts)


def _of_relation(node: Node) -> Any:
    if node.equation and named(node) is not None:
        return _set(node.items[-1])
    sides = values_of(node.items)
    if sides is None or "in" in node.signs:
        return None
    pairs = zip(node.signs, pairwise(sides), strict=True)
    relations = [_RELATIONS_OF_SYMPY[sign](left, right) for sign, (left, right) in pairs]
    return sympy.Intersection(*(relation.doit().as_set() for relation in relations))


def _of_value(text: str) -> Any:
    standard_set = _STANDARD_SETS.get("".join(text.split()))
    if standard_set is not None:
        return standard_set
    number = value(text)
    return None if number is None else sympy.FiniteSet(number)


def _of_interval(node: Node) -> Any:
    ends = values_of(node.items)
    if ends is None:
        return None
    left, right = ends
    if (left < right) != True:  # noqa: E712 - SymPy's answer may be neither
        return None
    return sympy.Interval(left, right, left_open=node.kind.startswith("("), right_open=node.kind.endswith(")"))
