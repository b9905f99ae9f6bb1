"""Find answers that are too large to evaluate, without evaluating them: towers of powers, huge factorials, brackets."""

from __future__ import annotations

import re
from math import inf, log10

MAX_DEPTH = 24  # nested brackets: twice the depth of MATH's gold answers
MAX_DIGITS = 10_000  # of a power of numbers
MAX_FACTORIAL = 2_000  # a number under one "!"

_OPEN_OR_CLOSE = re.compile(r"[(\[{]|[)\]}]")
_CLOSED = r"[\s)}\]]{0,8}"
_CHAIN = re.compile(rf"(\d+(?:{_CLOSED}\^[\s({{\[]{{0,8}}\d+)+)({_CLOSED}!)?")  # 9^{9^9}, perhaps under a factorial
_NUMBER = re.compile(r"\d+")
_FACTORIAL = re.compile(rf"(\d+){_CLOSED}(!(?:{_CLOSED}!)*)")


def is_too_complex(text: str) -> bool:
    """Return whether a symbolic answer is too large or too deeply nested to evaluate.

    An estimate from the numbers alone, for texts of at most `numeric.MAX_LENGTH` characters: a power of numbers with
    more than `MAX_DIGITS` digits, the factorial of more than `MAX_FACTORIAL` or of a large power or factorial, more
    than `MAX_DEPTH` nested brackets. Other answers still have the verifier's time limit.

    >>> is_too_complex("9^{9^{9^9}}"), is_too_complex("(10^{10})!"), is_too_complex("[" * 900)
    (True, True, True)
    >>> is_too_complex("2^{2024}"), is_too_complex("20!"), is_too_complex("e^{-x^2}"), is_too_complex("2^{2^5}")
    (False, False, False, False)
    """
    largest = {False: MAX_DIGITS, True: log10(MAX_FACTORIAL)}
    powers = any(_digits(chain) > largest[bool(under)] for chain, under in _CHAIN.findall(text))
    return powers or _too_deep(text) or any(_grows(*found) for found in _FACTORIAL.findall(text))


def _too_deep(text: str) -> bool:
    depth = 0
    for bracket in _OPEN_OR_CLOSE.findall(text):
        depth = max(0, depth + (1 if bracket in "([{" else -1))
        if depth > MAX_DEPTH:
            return True
    return False


def _digits(chain: str) -> float:
    """Return the decimal logarithm of a chain of powers, evaluated from the top."""
    base, *exponents = _NUMBER.findall(chain)
    power = 1
    for exponent in reversed(exponents):
        if len(exponent) > 6 or power > 20:
            return inf
        power = int(exponent) ** power
    return power * log10(int(base) or 1)


def _grows(number: str, marks: str) -> bool:
    """Whether a factorial of a number, or a factorial of that, is too large."""
    times = marks.count("!")
    return len(number) > 6 or int(number) > (MAX_FACTORIAL, 20, 3)[min(times, 3) - 1]
