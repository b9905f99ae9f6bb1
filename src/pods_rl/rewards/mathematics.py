"""Compare two answers as mathematics, without rounding. Only the name of a value is ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import sympy

from .expressions import same_expression, same_value, value
from .structure import INTERVALS, ORDERED, Expression, Group, Node, Relation, named, read

MAX_ITEMS = 64
Item = TypeVar("Item")
Difference = tuple[str, Any]  # a sign, and an expression

_LITERAL = {
    r"\mathbb{R}": "Reals", r"\mathbb{Z}": "Integers", r"\mathbb{N}": "Naturals", r"\mathbb{Q}": "Rationals",
    r"\emptyset": "EmptySet", r"\varnothing": "EmptySet", r"\{\}": "EmptySet",
}  # fmt: skip
_SIGNS: dict[str, Callable[..., Any]] = {
    "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "!=": sympy.Ne, "=": sympy.Eq,
}  # fmt: skip


def equal(gold: str, answer: str) -> bool:
    r"""Whether two answers, in the notation of `plain`, are equal.

    >>> equal(r"2\sqrt{2}", r"\sqrt{8}"), equal("x<3", r"(-\infty, 3)"), equal("x=5", "5"), equal("x+y=5", "5")
    (True, True, True, False)
    """
    return _same(read(gold), read(answer))


def _same(gold: Node, answer: Node) -> bool:
    if gold == answer:
        return True
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relation(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        stated = _stated(gold), _stated(answer)
        return _same(*stated) if stated != (gold, answer) else _same_set(gold, answer)
    if isinstance(gold, Expression) and isinstance(answer, Expression):
        return same_expression(gold.text, answer.text) or _same_set(gold, answer)
    return _same_group(gold, answer) or _same_set(gold, answer)


def _stated(node: Node) -> Node:
    """The value of an equation that states one: of a name (`x = 5`), or worked arithmetic that is true."""
    if not isinstance(node, Relation) or not node.equation:
        return node
    closed = "in" not in node.signs and all(_is_constant(side) for side in node.sides)
    if named(node) is not None or (closed and all(_same(*pair) for pair in pairwise(node.sides))):
        return node.sides[-1]
    return node


def _is_constant(node: Node) -> bool:
    found = value(node.text) if isinstance(node, Expression) else None
    return found is not None and not found.free_symbols


# --- groups ----------------------------------------------------------------------------------------------------------


def _same_group(gold: Node, answer: Node) -> bool:
    if isinstance(gold, Expression) or isinstance(answer, Expression):  # the one element of a set
        group, other = (answer, gold) if isinstance(gold, Expression) else (gold, answer)
        if not isinstance(group, Group):
            return False
        if group.kind == "ratio":
            return _same_ratio(group, Group("ratio", (other, Expression("1"))))
        return group.kind == "set" and len(group.items) == 1 and _same(group.items[0], other)
    if not isinstance(gold, Group) or not isinstance(answer, Group):
        return False
    kinds = {gold.kind, answer.kind}
    if kinds == {"ratio"}:
        return _same_ratio(gold, answer)
    ours, theirs = (_distinct(group.items) if _is_set(group) else group.items for group in (gold, answer))
    if len(ours) != len(theirs) or len(ours) > MAX_ITEMS:
        return False
    if kinds & set(ORDERED):
        brackets = kinds - {"list", "and"}
        alike = len(brackets) == 1 and (len(kinds) == 1 or brackets == {"()"} or len(ours) > 2)
        points = len(ours) > 2 and kinds == {"()", "[]"}
        return (alike or points) and all(map(_same, ours, theirs))
    if kinds & {"union", "minus"}:
        return kinds == {"union"} and _match_up(ours, theirs, _same)
    relations = all(isinstance(item, Relation) for item in (*ours, *theirs))
    if not relations and (_names_vary(ours) or _names_vary(theirs)):
        return all(map(_same, ours, theirs))  # by names if both lists have them, else by order
    return _match_up(ours, theirs, _same)


def _is_set(group: Group) -> bool:
    """Whether duplicate items count once: in a set or a list of points, not in a list of roots."""
    return group.kind == "set" or all(isinstance(item, Group) for item in group.items)


def _names_vary(items: Sequence[Node]) -> bool:
    names = {named(item) for item in items}
    return len(names) > 1 and None not in names


def _match_up(ours: Sequence[Item], theirs: Sequence[Item], same: Callable[[Item, Item], bool]) -> bool:
    """Whether every item of the one is the same as an item of the other, each used once."""
    left = list(theirs)
    for item in ours:
        match = next((other for other in left if same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _distinct(items: Sequence[Node]) -> list[Node]:
    found: list[Node] = []
    for item in items[: MAX_ITEMS + 1]:
        if not any(_same(item, other) for other in found):
            found.append(item)
    return found


def _same_ratio(gold: Group, answer: Group) -> bool:
    ours, theirs = _values(gold.items), _values(answer.items)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    return all(same_value(a * theirs[0], b * ours[0]) for a, b in zip(ours[1:], theirs[1:], strict=True))


def _values(items: Sequence[Node]) -> list[Any] | None:
    found = [value(item.text) if isinstance(item, Expression) else None for item in items]
    return None if any(each is None for each in found) else found


# --- relations and sets ----------------------------------------------------------------------------------------------


def _same_relation(gold: Relation, answer: Relation) -> bool:
    name = named(gold)
    if name is not None and name == named(answer):
        return _same(gold.sides[-1], answer.sides[-1])
    ours, theirs = _differences(gold), _differences(answer)
    if ours and theirs and len(ours) == len(theirs) and _match_up(ours, theirs, _proportional):
        return True
    return _same_set(gold, answer)


def _differences(relation: Relation) -> list[Difference] | None:
    """For each sign of a chain, `=`, `!=`, `<` or `<=`, and the expression that is compared with zero."""
    sides = _values(relation.sides)
    if sides is None or "in" in relation.signs or any(isinstance(side, sympy.MatrixBase) for side in sides):
        return None
    found = []
    for sign, (left, right) in zip(relation.signs, pairwise(sides), strict=True):
        flipped = sign.startswith(">")
        found.append((sign.replace(">", "<"), right - left if flipped else left - right))
    return found


def _proportional(ours: Difference, theirs: Difference) -> bool:
    """Whether two expressions are equal up to a constant factor, a positive one for an inequality."""
    (sign, gold), (other_sign, answer) = ours, theirs
    symbols = gold.free_symbols
    if sign != other_sign or not symbols or symbols != answer.free_symbols:
        return False
    point = dict(
        zip(sorted(symbols, key=str), (sympy.Rational(7 * i + 3, 5) for i in range(len(symbols))), strict=False)
    )
    scales = gold.xreplace(point), answer.xreplace(point)
    if any(not scale.is_number or same_value(scale, sympy.Integer(0)) for scale in scales):
        return False
    return (sign in ("=", "!=") or sympy.N(scales[0] / scales[1]) > 0) and same_value(
        gold * scales[1], answer * scales[0]
    )


def _same_set(gold: Node, answer: Node) -> bool:
    """Compare as sets of real numbers, if one of the two is more than a list: `x < 3` is `(-\\infty, 3)`."""
    if not (_is_region(gold) and _is_region(answer)) or len(_variables(gold) | _variables(answer)) > 1:
        return False
    sets = _set(gold), _set(answer)
    if None in sets:
        return False
    return bool(sets[0] == sets[1] or sets[0].symmetric_difference(sets[1]).is_empty)


def _is_region(node: Node) -> bool:
    if isinstance(node, Group):
        return node.kind in (*INTERVALS, "set", "union", "minus") or any(map(_is_region, node.items))
    if isinstance(node, Relation):
        return not node.equation or "in" in node.signs
    return "".join(node.text.split()) in _LITERAL


def _variables(node: Node) -> set[str]:
    if isinstance(node, Group):
        return {name for item in node.items for name in _variables(item)}
    if not isinstance(node, Relation):
        return set()
    name = named(node)
    if name is not None:
        return {name}
    return {str(symbol) for side in _values(node.sides) or () for symbol in side.free_symbols}


def _set(node: Node) -> Any:
    if isinstance(node, Relation):
        if node.equation and named(node) is not None:
            return _set(node.sides[-1])
        sides = _values(node.sides)
        if sides is None or "in" in node.signs:
            return None
        relations = [_SIGNS[sign](*pair) for sign, pair in zip(node.signs, pairwise(sides), strict=True)]
        return sympy.Intersection(*(relation.doit().as_set() for relation in relations))
    if isinstance(node, Expression):
        name = _LITERAL.get("".join(node.text.split()))
        found = value(node.text)
        return getattr(sympy.S, name) if name else None if found is None else sympy.FiniteSet(found)
    if node.kind in INTERVALS and len(node.items) == 2:
        ends = _values(node.items)
        if ends is None or (ends[0] < ends[1]) != True:  # noqa: E712 - SymPy's answer may be neither
            return None
        return sympy.Interval(*ends, left_open=node.kind[0] == "(", right_open=node.kind[1] == ")")
    parts = [_set(item) for item in node.items]
    if node.kind in INTERVALS or None in parts:
        return None
    if node.kind == "minus":
        return sympy.Complement(*parts)
    return sympy.Intersection(*parts) if node.kind == "and" else sympy.Union(*parts)
