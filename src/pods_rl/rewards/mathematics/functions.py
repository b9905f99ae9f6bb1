r"""Read the functions that the parser does not: `\max(a, b)`, `\gcd(a, b)` and `5!!`. Runs in a verifier process.

Each call is replaced by a symbol in the text, and the symbol by its value in what the parser returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy

MAX_CALLS = 8  # in an expression
MAX_DOUBLE_FACTORIAL = 2000

_CALL = re.compile(
    r"(?:\\(?:operatorname\s*\{\s*)?|(?<![A-Za-z\\]))(?P<name>max|min|gcd|lcm)(?:imum)?\s*\}?\s*(?P<open>\\\{|\(|\{)"
)
_CLOSING = {r"\{": r"\}", "(": ")", "{": "}"}
_BRACKET = re.compile(r"\\[{}]|[(){}\[\],]")
_DOUBLE = re.compile(r"(?<![\w.}])([0-9]+|[A-Za-z])\s*!\s*!(?!\s*!)")  # 5!!, n!!
_DOUBLE_OF_GROUP = re.compile(r"\(([^()]*)\)\s*!\s*!(?!\s*!)")  # (2n-1)!!


def take_out(text: str, value: Callable[[str], Any]) -> tuple[str, dict[str, Any]] | None:
    r"""Return a text with a symbol in place of each call, and the value of each symbol; None if a call has no value.

    `value` evaluates the arguments.

    >>> text, values = take_out(r"1 + \max(b, a)", sympy.Symbol)
    >>> text, [str(value) for value in values.values()]
    ('1 + (\\omicron_{1})', ['Max(a, b)'])
    """
    values: dict[str, Any] = {}
    for pattern in (_DOUBLE, _DOUBLE_OF_GROUP):
        for _ in range(MAX_CALLS):
            double = pattern.search(text)
            if double is None:
                break
            result = _double_factorial(value(double[1]))
            if result is None:
                return None
            text = text[: double.start()] + _new_symbol(values, result) + text[double.end() :]
    for _ in range(MAX_CALLS):
        call = _CALL.search(text)
        if call is None:
            break
        arguments, end = _arguments(text, call.end(), _CLOSING[call["open"]])
        if len(arguments) < 2:
            return None
        parts = [value(argument.strip()) for argument in arguments]
        result = _apply(call["name"], parts)
        if result is None:
            return None
        text = text[: call.start()] + _new_symbol(values, result) + text[end:]
    return text, values


def put_back(expression: Any, values: dict[str, Any]) -> Any:
    """Return a parsed expression with the values of its symbols."""
    if not values:
        return expression
    named = {}
    for symbol in expression.free_symbols:
        name = re.sub("[{}]", "", symbol.name)
        if name in values:
            named[symbol] = values[name]
    return expression.xreplace(named)


def _new_symbol(values: dict[str, Any], result: Any) -> str:
    number = len(values) + 1
    values[f"omicron_{number}"] = result
    return rf"(\omicron_{{{number}}})"  # which no answer has


def _double_factorial(number: Any) -> Any:
    if number is None or not isinstance(number, sympy.Expr):
        return None
    if number.is_number and not (number.is_Integer and 0 <= number <= MAX_DOUBLE_FACTORIAL):
        return None
    return sympy.factorial2(number)


def _apply(name: str, parts: list[Any]) -> Any:
    if not all(isinstance(part, sympy.Expr) for part in parts):
        return None
    if name in ("max", "min"):
        if any(part.is_number and not part.is_extended_real for part in parts):
            return None
        return sympy.Max(*parts) if name == "max" else sympy.Min(*parts)
    if all(part.is_Integer for part in parts):
        return sympy.Integer(sympy.igcd(*parts) if name == "gcd" else sympy.ilcm(*parts))
    # the same for the arguments in any order
    arguments = ", ".join(sorted({str(part) for part in parts}))
    return sympy.Symbol(f"{name} of {arguments}", positive=True)


def _arguments(text: str, start: int, closing: str) -> tuple[list[str], int]:
    """Return the arguments between brackets, and where the text goes on; none if a bracket is missing."""
    depth = 0
    arguments = []
    begin = start
    for bracket in _BRACKET.finditer(text, start):
        sign = bracket[0]
        if depth == 0 and sign in (",", closing):
            arguments.append(text[begin : bracket.start()])
            begin = bracket.end()
            if sign == closing:
                return arguments, begin
        elif sign in ("(", "[", "{", r"\{"):
            depth += 1
        elif sign != ",":
            depth -= 1
    return [], start
