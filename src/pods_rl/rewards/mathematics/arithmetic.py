"""Evaluate arithmetic of numbers exactly, never through a float or `eval`."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from itertools import pairwise

_FRACTION_OF_SUMS = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")  # \frac{1+2}{6}
_NO_ARITHMETIC = re.compile(
    r"\\(?:left|right|displaystyle)(?![a-z])"  # \left(
    r"|\\[,;:! ()\[\]]"  # \, and \[
    r"|[$`]"
)
_TIMES = re.compile(
    r"\\(?:times|cdot)(?![a-z])"  # 2 \times 3
    r"|(?<=[0-9)\s])[xX](?=[0-9(\s])"  # 2x3, 2 x 3
)
_OPERATORS = str.maketrans("×·∗÷∶−–[]{}", "***//--()()")
_IMPLICIT = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")  # 2(3+4), (3+4)2
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")  # the comma of 1,200
_ARITHMETIC = re.compile(r"[0-9]{1,100}(?:\.[0-9]{1,100})?|[-+*/()]")  # 12, 12.5, +
_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")  # of 007: Python does not read such numbers
_DOTTED_SUM = re.compile(r"\s*((?:[0-9]{1,9}\s*\+\s*){2,9})(?:\.{3}|\\[lc]?dots)\s*\+\s*([0-9]{1,9})\s*")  # 1+2+...+9
_APPLY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def read_expression(text: str) -> Fraction | None:
    r"""Return the exact value of arithmetic on numbers, or None. Division by zero has no value.

    The caller bounds the length of the text.

    >>> read_expression(r"(1 + 2) \div 6"), read_expression("2 ** 3") is None
    (Fraction(1, 2), True)
    """
    text = text.strip().removesuffix(".")
    if text.startswith("**") and text.endswith("**"):  # bold
        text = text[2:-2]
    text = _FRACTION_OF_SUMS.sub(r"((\1)/(\2))", text)
    text = _NO_ARITHMETIC.sub("", text)
    text = _THOUSANDS.sub("", text)
    text = _TIMES.sub("*", text.replace(r"\div", "/"))
    text = text.translate(_OPERATORS)
    text = _IMPLICIT.sub("*", text).strip()
    if "".join(_ARITHMETIC.findall(text)) != "".join(text.split()):
        return None
    text = _ZEROS.sub("", text)

    def evaluate(part: ast.AST) -> Fraction:
        if isinstance(part, ast.BinOp):
            left = evaluate(part.left)
            right = evaluate(part.right)
            return _APPLY[type(part.op)](left, right)
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
            return -evaluate(part.operand)
        if not isinstance(part, ast.Constant):
            raise ValueError(part)
        # from the text, since Python has read it as a float
        return Fraction(text[part.col_offset : part.end_col_offset])

    try:
        return evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def sum_of_progression(text: str) -> int | None:
    r"""Return the sum of an arithmetic or a geometric progression that dots shorten; None if the text may be both.

    >>> sum_of_progression(r"1+3+5+\dots+99"), sum_of_progression("1+2+4+...+64"), sum_of_progression("1+2+...+64")
    (2500, 127, None)
    """
    written = _DOTTED_SUM.fullmatch(text)
    if written is None:
        return None
    terms = [int(term) for term in re.findall("[0-9]+", written[1])]
    last = int(written[2])
    step = terms[1] - terms[0]
    ratio = Fraction(terms[1], terms[0] or 1)
    sums = []
    if step > 0 and all(b - a == step for a, b in pairwise(terms)) and (last - terms[-1]) % step == 0:
        sums.append((last + terms[0]) * ((last - terms[0]) // step + 1) // 2)
    if ratio > 1 and all(a * ratio == b for a, b in pairwise(terms)):
        term = Fraction(terms[0])
        total = term
        while term < last:
            term *= ratio
            total += term
        if term == last:
            sums.append(int(total))
    return sums[0] if len(sums) == 1 and last > terms[-1] else None
