"""Evaluate an arithmetic expression of numbers exactly, in bounded time and without `eval`."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DRESS = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ()\[\]]|[$`]")
_TIMES = re.compile(r"\\(?:times|cdot)(?![a-z])|(?<=[0-9)\s])[xX](?=[0-9(\s])")
_OPERATORS = str.maketrans("×·∗÷∶−–[]{}", "***//--()()")
_IMPLICIT = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_OPERAND = re.compile(r"[0-9]{1,100}(?:\.[0-9]{1,100})?")
_SIGNED_OPERAND = re.compile(rf"-?{_OPERAND.pattern}")
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
    text = _THOUSANDS.sub("", _DRESS.sub("", _FRACTION.sub(r"((\1)/(\2))", text)))
    text = _TIMES.sub("*", text.replace(r"\div", "/")).translate(_OPERATORS)
    return _IMPLICIT.sub("*", text).strip()


def _evaluate(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Parse with Python's grammar, each number as a name, and apply the four operators and the minus sign."""
    if re.search(r"[^-+*/(). 0-9\s]", text):
        return None
    operands = [Fraction(number) for number in _OPERAND.findall(text)]
    names = iter(range(len(operands)))
    try:
        tree = ast.parse(_OPERAND.sub(lambda _: f"n{next(names)}", " ".join(text.split())), mode="eval")
        return _apply(tree.body, operands), Counter(operands)
    except (SyntaxError, ValueError, LookupError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _apply(node: ast.expr, operands: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Name):
        return operands[int(node.id[1:])]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_apply(node.operand, operands)
    if isinstance(node, ast.BinOp):
        return _APPLY[type(node.op)](_apply(node.left, operands), _apply(node.right, operands))  # type: ignore[index]
    raise ValueError("only numbers and + - * / are allowed")
