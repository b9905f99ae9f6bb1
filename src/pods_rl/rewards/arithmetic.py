"""Evaluate an arithmetic expression of numbers exactly, in bounded time and without `eval`."""

from __future__ import annotations

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
_TOKEN = re.compile(rf"{_OPERAND.pattern}|[-+*/()]")
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


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
    """Precedence climbing, with the sign of a number as the tightest operator."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        return None
    tokens.reverse()
    numbers: Counter[Fraction] = Counter()

    def parse(rank: int) -> Fraction:
        token = tokens.pop()
        if token == "-":
            value = -parse(2)
        elif token == "(":
            value = parse(0)
            if tokens.pop() != ")":
                raise ValueError
        else:
            value = Fraction(token)  # raises ValueError for an operator
            numbers[value] += 1
        while tokens and _RANK.get(tokens[-1], 0) > rank:
            sign = tokens.pop()
            value = _APPLY[sign](value, parse(_RANK[sign]))
        return value

    try:
        found = parse(0)
    except (ValueError, IndexError, ZeroDivisionError, RecursionError):
        return None
    return None if tokens else (found, numbers)
