r"""Compare two answers as mathematics, without rounding. Runs in a verifier process.

The parser behind math-verify reads expressions and SymPy evaluates them. math-verify's own `verify` rounds (0.333333
equals 1/3), takes the last side of any equation and ignores case and units, so it does not decide here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import sympy

from .assignments import assignments, in_order
from .identity import same_value
from .regions import is_region, same_set
from .structure import BRACKETS, Node, named, structure
from .values import number, value, values_of


def equal(gold: str, answer: str) -> bool:
    r"""Whether two answers, in the notation of `plain`, are equal.

    >>> equal(r"2\sqrt{2}", r"\sqrt{8}"), equal("x<3", r"(-\infty, 3)"), equal("x=5", "5"), equal("x+y=5", "5")
    (True, True, True, False)
    """
    gold_node = _without_approximations(structure(gold))
    answer_node = _without_approximations(structure(answer))
    if gold_node is None or answer_node is None:
        return False
    return _same(gold_node, answer_node)


def _same(gold: Node, answer: Node) -> bool:
    if gold == answer:
        return True
    verdict = _same_assignments(gold, answer)
    if verdict is not None:
        return verdict
    kinds = {gold.kind, answer.kind}
    if kinds == {"relation"}:
        return _same_relation(gold, answer)
    if "relation" in kinds:
        stated_gold = _stated(gold)
        stated_answer = _stated(answer)
        if stated_gold == gold and stated_answer == answer:
            return same_set(gold, answer)
        return _same(stated_gold, stated_answer)
    if "base" in kinds:  # a numeral in a base equals only itself
        return False
    if kinds == {"value"}:
        return _same_expression(gold.text, answer.text) or same_set(gold, answer)
    return _same_group(gold, answer) or same_set(gold, answer)


def _same_expression(gold: str, answer: str) -> bool:
    if "".join(gold.split()) == "".join(answer.split()) and not re.search(r"[0-9]\s+[0-9]", gold + "|" + answer):
        return True
    gold_number = number(gold)
    answer_number = number(answer)
    if gold_number and answer_number:
        return answer_number.equals(gold_number)
    gold_value = value(gold)
    answer_value = value(answer)
    if gold_value is None or answer_value is None:
        return False
    digits = sum(sign.isdigit() for sign in gold + answer)
    if not isinstance(gold_value, sympy.MatrixBase) and not isinstance(answer_value, sympy.MatrixBase):
        return same_value(gold_value, answer_value, digits)
    if getattr(gold_value, "shape", None) != getattr(answer_value, "shape", None):
        return False
    return all(same_value(a, b, digits) for a, b in zip(gold_value, answer_value, strict=True))


def _same_assignments(gold: Node, answer: Node) -> bool | None:
    """Compare assignments by name with others, or with a tuple without names; None if there are none."""
    gold_values = assignments(gold)
    answer_values = assignments(answer)
    if gold_values and answer_values:
        if set(gold_values) != set(answer_values):
            return False
        return all(_same(value, answer_values[name]) for name, value in gold_values.items())
    if gold_values:
        # a gold answer that lists its names, (y, x) = (3, 2), is what the question asks for
        ordered = list(gold_values.values()) if gold.kind == "relation" else in_order(gold_values)
        bare = answer
    elif answer_values:
        ordered = in_order(answer_values)
        bare = gold
    elif "()" in (gold.kind, answer.kind) and (_assigns_one_name(gold) or _assigns_one_name(answer)):
        return False  # x = 3, x = 2 is not the point (3, 2)
    else:
        return None
    if ordered is None or bare.kind not in ("()", "list") or len(bare.items) != len(ordered):
        return None
    if any(item.kind != "value" for item in bare.items):
        return None
    if bare.kind == "list" and all("_" in name for name in gold_values or answer_values or ()):
        return None  # x_1 and x_2 are roots, in any order
    return all(map(_same, ordered, bare.items))


def _assigns_one_name(node: Node) -> bool:
    """Whether a list assigns several values to one name."""
    names = {named(item) for item in node.items}
    return node.kind in ("list", "and", "or") and len(names) == 1 and None not in names


def _without_approximations(node: Node) -> Node | None:
    r"""Return a node with the exact part alone of each approximation, or None if one is false, as `10 \approx 9`."""
    if node.kind == "approximation":
        exact, *roundings = node.items
        if exact == Node("value"):  # nothing before the sign, so that two of them would seem equal
            return None
        if not all(_may_be_rounded(exact, rounding) for rounding in roundings):
            return None
        return exact
    items = [_without_approximations(item) for item in node.items]
    if any(item is None for item in items):
        return None
    return node._replace(items=tuple(items))


def _may_be_rounded(exact: Node, rounding: Node) -> bool:
    r"""Whether a decimal is an exact value rounded to its digits, or cut off; True where one is not a number.

    Also True where the exact part states the value of a name: what follows in `x = 1/3 \approx 0.3` is a remark.
    """
    if named(exact) is not None:
        return True
    if exact.kind == "relation":
        exact = exact.items[-1]
    decimal = number(rounding.text) if rounding.kind == "value" else None
    exact_value = value(exact.text) if exact.kind == "value" else None
    if decimal is None or exact_value is None or not getattr(exact_value, "is_real", False):
        return True
    digits = re.search(r"[0-9]+(?:\.[0-9]+)?", rounding.text.replace(",", ""))
    if digits is None or not exact_value.is_number:
        return True
    rounded = sympy.Rational(decimal.value.numerator, decimal.value.denominator)
    _, dot, decimals = digits[0].partition(".")
    zeros = len(digits[0]) - len(digits[0].rstrip("0"))
    last_digit = Fraction(1, 10 ** len(decimals)) if dot else Fraction(10**zeros)  # 1/100 for 3.14, 10 for 30
    units = (abs(exact_value) - abs(rounded)).evalf(15) / float(last_digit)
    return exact_value * rounded >= 0 and -0.5 <= units < 1  # rounded, or cut off


# -- relations ---------------------------------------------------------------------------------------------------------


def _stated(node: Node) -> Node:
    """Return the value of an equation that states one: of a name (`x = 5`), or worked arithmetic that is true."""
    if not node.equation:
        return node
    if named(node) is not None or _is_true_arithmetic(node):
        return node.items[-1]
    return node


def _is_true_arithmetic(equation: Node) -> bool:
    if "in" in equation.signs:
        return False
    sides = values_of(equation.items)
    if not sides or any(side.free_symbols for side in sides):
        return False
    return all(same_value(left, right) for left, right in pairwise(sides))


def _same_relation(gold: Node, answer: Node) -> bool:
    name = named(gold)
    if name is not None and name == named(answer):
        return _same(gold.items[-1], answer.items[-1])
    golds = _differences(gold)
    answers = _differences(answer)
    if golds and answers and len(golds) == len(answers) and _match_up(golds, answers, _proportional):
        return True
    return same_set(gold, answer)


def _differences(relation: Node) -> list[tuple[str, Any]] | None:
    """Return for each sign of a chain `=`, `!=`, `<` or `<=`, and the expression that is compared with zero."""
    sides = values_of(relation.items)
    if sides is None or "in" in relation.signs or any(isinstance(side, sympy.MatrixBase) for side in sides):
        return None
    differences = []
    for sign, (left, right) in zip(relation.signs, pairwise(sides), strict=True):
        if sign.startswith(">"):
            differences.append((sign.replace(">", "<"), right - left))
        else:
            differences.append((sign, left - right))
    return differences


def _proportional(gold: tuple[str, Any], answer: tuple[str, Any]) -> bool:
    """Whether two expressions are equal up to a constant factor, a positive one for an inequality."""
    gold_sign, gold_difference = gold
    answer_sign, answer_difference = answer
    symbols = gold_difference.free_symbols
    if gold_sign != answer_sign or not symbols or symbols != answer_difference.free_symbols:
        return False
    point = {symbol: sympy.Rational(7 * i + 3, 5) for i, symbol in enumerate(sorted(symbols, key=str))}
    gold_scale = gold_difference.xreplace(point)
    answer_scale = answer_difference.xreplace(point)
    for scale in (gold_scale, answer_scale):
        if not scale.is_number or same_value(scale, sympy.Integer(0)):
            return False
    if gold_sign not in ("=", "!=") and not sympy.N(gold_scale / answer_scale) > 0:
        return False
    return same_value(gold_difference * answer_scale, answer_difference * gold_scale)


# -- groups ------------------------------------------------------------------------------------------------------------

_OPERATIONS = {"union", "minus", "cap"}


def _same_group(gold: Node, answer: Node) -> bool:
    if gold.kind == "value":
        return _is_set_of(answer, gold)
    if answer.kind == "value":
        return _is_set_of(gold, answer)
    kinds = {gold.kind, answer.kind}
    if (_is_set(gold) or _is_set(answer)) and not kinds & {*BRACKETS, *_OPERATIONS}:
        return _covers(gold.items, answer.items) and _covers(answer.items, gold.items)
    if len(gold.items) != len(answer.items):
        return False
    if kinds & {*BRACKETS, "ratio"}:
        return _may_be_one_tuple(kinds, len(gold.items)) and all(map(_same, gold.items, answer.items))
    if kinds & _OPERATIONS:  # a difference is compared as a set only
        return kinds in ({"union"}, {"cap"}) and _match_up(gold.items, answer.items, _same)
    items = (*gold.items, *answer.items)
    if len(kinds) > 1 and any(item.kind == "relation" and not item.equation for item in items):
        return False  # x > 2 and x < 5 is not x > 2 or x < 5
    are_relations = all(item.kind == "relation" for item in items)
    if not are_relations and (_names_vary(gold.items) or _names_vary(answer.items)):
        return all(map(_same, gold.items, answer.items))  # by names if both lists have them, else by order
    return _match_up(gold.items, answer.items, _same)


def _is_set_of(group: Node, element: Node) -> bool:
    """Whether a group is the set of one element, which may be written without braces."""
    if group.kind != "set" or len(group.items) != 1 or is_region(element):
        return False
    return _same(group.items[0], element)


def _may_be_one_tuple(kinds: set[str], length: int) -> bool:
    """Whether groups of these kinds and this length can be the same tuple, interval or ratio.

    A list can be a tuple without its parentheses, and more than two items are no interval.
    """
    if len(kinds) == 1:
        return True
    if length > 2 and kinds == {"()", "[]"}:
        return True
    brackets = kinds - {"list", "and", "or"}
    return len(brackets) == 1 and (brackets == {"()"} or length > 2)


def _is_set(group: Node) -> bool:
    """Whether duplicate items count once: in a set or a list of points, not in a list of roots."""
    return group.kind == "set" or all(item.kind not in ("value", "relation") for item in group.items)


def _names_vary(items: Sequence[Node]) -> bool:
    """Whether every item states the value of a name, and not all of the same one; x_1 and x_2 count as the same."""
    names = set()
    for item in items:
        name = named(item)
        if not name:
            return False
        names.add(re.sub(r"_.*", "", name))
    return len(names) > 1


def _match_up(golds: Sequence[Any], answers: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether every gold item is the same as an item of the answer, each used once."""
    left = list(answers)
    for gold in golds:
        for position, answer in enumerate(left):
            if same(gold, answer):
                del left[position]
                break
        else:
            return False
    return True


def _covers(items: Sequence[Node], others: Sequence[Node]) -> bool:
    """Whether every item is the same as one of the others."""
    return all(any(_same(item, other) for other in others) for item in items)
