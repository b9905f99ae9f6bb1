"""Decide whether two SymPy expressions are equal, without rounding. Runs in a verifier process.

Two are equal if their difference is zero to `EXTRA_DIGITS` more digits than are written, at several points of their
variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

EXTRA_DIGITS = 60
GUARD_DIGITS = 15
SCALES = (1, 3, 17, 211, 211, 7, 43, 1)  # of the points, in turn above and below zero: |x - 20| is 20 - x up to 20
SIGNS = (1, 2, 4, 3, 5, 6, 7)  # bits of a point's number that decide a symbol's sign: each pair has all four signs
FEW_POINTS = 5  # for up to two symbols
REAL_POINTS = 64  # tried to find those where every part is real
ENOUGH_REAL_POINTS = (8, 10, 12)  # for one, two, more symbols
FEWEST_REAL_POINTS = 3
# Sizes of the points in hundredths, small and large in turn, since domains such as that of asin are small.
SIZES = (1, 60, 7000, 9, 400, 2, 90, 10000, 14, 800, 4, 140, 20, 1600, 30, 3000)
SMALL_SIZES = (1, 60, 300, 9, 200, 2, 90, 150, 14, 250, 4, 140, 20, 110, 30, 180)  # of symbols in exponents


def same_value(a: Any, b: Any, written: int = 0) -> bool:
    """Whether two expressions are equal at every point at which both have a value, and there are enough such points.

    Without the imaginary unit, a point counts only if every part of both is real there, so that `ln(x^3)` equals
    `3 ln(x)`. If there are too few such points, complex values are compared.
    """
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or a.has(sympy.oo) or b.has(sympy.oo):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return _is_same_number(a, b, written, cancels=True) is True
    if not (a.has(sympy.I) or b.has(sympy.I)):
        verdict = _same_on_reals(a, b, symbols, written)
        if verdict is not None:
            return verdict
    agreed = 0
    for point in _points(symbols):
        verdict = _is_same_number(a.xreplace(point), b.xreplace(point), written, cancels=False)
        if verdict is False:
            return False
        if verdict:
            agreed += 1
    return agreed >= 2


def _points(symbols: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Yield irregular rationals of either sign, so that no identity of integers or of positive numbers passes."""
    count = FEW_POINTS if len(symbols) < 3 else len(SCALES)
    for number, scale in enumerate(SCALES[:count]):
        point = {}
        for i, symbol in enumerate(symbols):
            point[symbol] = sympy.Rational(_sign(number, i) * scale * (97 + 41 * i * i), 89 + 13 * number)
        yield point


def _sign(number: int, i: int) -> int:
    """Return the sign of symbol `i` at a point: any two symbols have each pair of signs at some of eight points."""
    bits = number & SIGNS[i % len(SIGNS)]
    return -1 if bits.bit_count() % 2 else 1


# -- identities on the real domain -------------------------------------------------------------------------------------

_PARTLY_REAL = (  # functions that are not real at every real number
    sympy.log, sympy.asin, sympy.acos, sympy.asec, sympy.acsc, sympy.acosh, sympy.atanh, sympy.acoth, sympy.asech,
    sympy.LambertW,
)  # fmt: skip


def _same_on_reals(a: Any, b: Any, symbols: Sequence[Any], written: int) -> bool | None:
    """Compare at points where every part of both is real; None if no part restricts them or too few are found."""
    real_a = _with_real_roots(a)
    real_b = _with_real_roots(b)
    parts = list(dict.fromkeys([*_restricted_parts(real_a), *_restricted_parts(real_b)]))
    if not parts and real_a == a and real_b == b:
        return None
    has_powers = any(part.is_Pow and part.exp.free_symbols for part in parts)
    enough = ENOUGH_REAL_POINTS[min(len(symbols), 3) - 1]
    agreed = 0
    for point in _real_points(symbols, has_powers=has_powers):
        if not all(_is_real(part, point) for part in parts):
            continue
        verdict = _is_same_number(real_a, real_b, written, cancels=False, point=point)
        if verdict is False:
            return False
        if verdict:
            agreed += 1
        if agreed == enough:
            break
    return True if agreed >= FEWEST_REAL_POINTS else None


def _real_points(symbols: Sequence[Any], *, has_powers: bool) -> Iterator[dict[Any, Any]]:
    """Yield points with all signs and in every order of size.

    `has_powers`: symbols are in exponents, where large numbers take too long.
    """
    sizes = SMALL_SIZES if has_powers else SIZES
    if not has_powers:
        yield from _points(symbols)
    patterns = 2 ** min(len(symbols), 3)
    for number in range(REAL_POINTS):
        rung = number // patterns
        point = {}
        for i, symbol in enumerate(symbols):
            size = sizes[(rung + 5 * i * (1 + rung)) % len(sizes)]
            # the denominator is prime, so that no point is special
            point[symbol] = _sign(number, i) * sympy.Rational(size * (997 + 31 * i + number), 99991)
        yield point


def _with_real_roots(expression: Any) -> Any:
    """Write odd roots as real ones, which negative numbers have too: the cube root of -x is minus that of x."""

    def is_odd_root(part: Any) -> bool:
        return bool(part.is_Pow and part.exp.is_Rational and part.exp.q > 1 and part.exp.q % 2 and part.free_symbols)

    def real_root(part: Any) -> Any:
        return sympy.sign(part.base) ** part.exp.p * sympy.Abs(part.base) ** part.exp

    return expression.replace(is_odd_root, real_root)


def _restricted_parts(expression: Any) -> list[Any]:
    """Return the parts that are real only for some values of their symbols."""
    parts = []
    for part in sympy.preorder_traversal(expression):
        if not getattr(part, "free_symbols", None):
            continue
        # a power of a positive number, or of an absolute value, is real wherever its exponent is
        if isinstance(part, _PARTLY_REAL) or (
            part.is_Pow and not part.exp.is_Integer and not (part.base.is_positive or isinstance(part.base, sympy.Abs))
        ):
            parts.append(part)
    return parts


def _is_real(part: Any, point: Mapping[Any, Any]) -> bool:
    real, imaginary = part.evalf(15, subs=point).as_real_imag()
    return bool(real.is_Float or real.is_Rational) and imaginary == 0


def _is_same_number(
    a: Any, b: Any, written: int, *, cancels: bool, point: Mapping[Any, Any] | None = None
) -> bool | None:
    """Whether two numbers are equal, or None if one of them has no value.

    Args:
        a, b: numbers, or expressions of the symbols of `point`.
        written: digits of both as written.
        cancels: more digits than the value's own may cancel, as in 10^100 - sqrt(10^200 + 1).
        point: the values of symbols, put in while evaluating, without exact arithmetic.
    """
    size = abs(a.evalf(3, subs=point))
    if not size.is_Float and not size.is_Rational:
        return None
    magnitude = max(0, int(sympy.log(size, 10).evalf(3))) if size else 0
    digits = EXTRA_DIGITS + written + magnitude
    if cancels:
        digits += min(2 * magnitude, 1000)
    difference = sympy.Add(a, -b, evaluate=False).evalf(2, maxn=digits, subs=point)
    parts = difference.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    noise = (size or 1) * sympy.Float(10) ** (GUARD_DIGITS - digits)
    for part in parts:
        cancelled = part.is_Float and part._prec == 1  # no digit is left
        if part != 0 and not cancelled and not abs(part) < noise:
            return False
    return True
