"""Compare two expressions exactly.

The parser of math-verify reads them and SymPy evaluates them. They are equal if their difference is zero to
`EXTRA_DIGITS` more digits than are written, at several points of their variables.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from sympy.core.function import AppliedUndef

from .numeric import Number, read_number, read_number_in_words

EXTRA_DIGITS = 60
GUARD_DIGITS = 15
SCALES = (1, 3, 17, 211, 211)  # of the points, in turn above and below zero: |x - 20| is 20 - x up to 20

_SYMBOLS = ConversionConfig(lowercase_symbols=False)
_REPAIRS = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
_COMMAND = re.compile(
    r"(?<![\\A-Za-z])(a?r?c?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|pi|infty|infinity|inf)(?![A-Za-z])"
)
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_PART = r"(\{[^{}]*\}|\\[A-Za-z]+|[0-9A-Za-z])"
_FRACTION = re.compile(rf"\\[dtc]?frac\s*{_PART}\s*{_PART}")
_ROOT = re.compile(r"(?<![A-Za-z\\])\\?sqrt\s*\(([^()]*)\)")
_DECIMAL = re.compile(r"(?<![\w.])([0-9]*)\.([0-9]+)|(?<![\w.])([0-9]+)\.(?![0-9])")
_MIXED = re.compile(
    r"(?<![\w.)}^/_])([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.])|\s*\\frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\})"
)
_HALF = re.compile(r"(?<![\w.)}/^])(?<!\^ )([0-9]+)\s*/\s*([0-9]+)(?=\s*(?:[A-Za-z(]|\\[a-z]))")  # 1/2x is half of x
_UNREADABLE = re.compile(r"[0-9]\s+[0-9]|[-+]\s*[-+]|[0-9}]\s*_|[%:,;]|^\s*$|[-+*/^=]\s*$|^\s*[*/^=]|\.\.")
_BASE_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_IN_BASE = re.compile(
    r"\(?\s*([0-9][0-9A-Fa-f]*)\s*\)?\s*_\s*\{?\s*\(?([0-9]+|" + "|".join(_BASE_WORDS) + r")\)?\s*\}?"
)


def same_expression(gold: str, answer: str) -> bool:
    r"""Whether two expressions are equal, or the same text.

    >>> same_expression(r"\sqrt{8}", r"2\sqrt{2}"), same_expression(r"\pi", "3.14159265358979")
    (True, False)
    """
    if _SPACE.sub("", gold) == _SPACE.sub("", answer):
        return True
    bases = [_IN_BASE.fullmatch(text.strip()) for text in (gold, answer)]
    if any(bases):  # a numeral equals only the same numeral in the same base
        numerals = [base and (base[1].lstrip("0").upper(), _base(base[2])) for base in bases]
        return numerals[0] == numerals[1]
    numbers = _number(gold), _number(answer)
    if numbers[0] and numbers[1]:
        return numbers[0].equals(numbers[1])
    ours, theirs = value(gold), value(answer)
    if ours is None or theirs is None:
        return False
    written = sum(sign.isdigit() for sign in gold + answer)
    if isinstance(ours, sympy.MatrixBase) or isinstance(theirs, sympy.MatrixBase):
        alike = getattr(ours, "shape", None) == getattr(theirs, "shape", None)
        return alike and all(same_value(a, b, written) for a, b in zip(ours, theirs, strict=True))
    return same_value(ours, theirs, written)


def _base(text: str) -> int:
    return _BASE_WORDS.index(text) + 2 if text in _BASE_WORDS else int(text)


def _number(text: str) -> Number | None:
    return read_number(text) or (read_number_in_words(text) if re.search("[A-Za-z]{2}", text) else None)


@lru_cache(maxsize=256)
def value(text: str) -> Any:
    """Parse an expression into an exact SymPy expression or matrix, with `i` as the imaginary unit, or None."""
    number = _number(text)
    if number:
        return sympy.Rational(number.fraction.numerator, number.fraction.denominator)
    text = re.sub(r"([A-Za-z}])('+)", lambda prime: f"{prime[1]}_{{{'p' * len(prime[2])}}}", text)
    text = _FRACTION.sub(_braced, _ROOT.sub(r"\\sqrt{\1}", text))
    text = normalize_latex(_COMMAND.sub(r"\\\1", text), _REPAIRS)
    if _UNREADABLE.search(_MIXED.sub("1", text)):
        return None
    text = _HALF.sub(r"\\frac{\1}{\2}", _MIXED.sub(_improper, text))
    text = _DECIMAL.sub(_exact_decimal, text)
    try:
        found = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_SYMBOLS)
    except MemoryError:
        raise
    except Exception:
        return None
    return _settled(found)


def _braced(fraction: re.Match[str]) -> str:
    top, bottom = (part if part[0] == "{" else f"{{{part}}}" for part in fraction.groups())
    return rf"\frac{top}{bottom}"


def _improper(mixed: re.Match[str]) -> str:
    whole, top, bottom = (int(part) for part in mixed.groups() if part)
    return rf"{{\frac{{{whole * bottom + top}}}{{{bottom}}}}}"


def _exact_decimal(match: re.Match[str]) -> str:
    exact = Fraction(match[0] if match[0][-1] != "." else match[0][:-1])
    return rf"{{\frac{{{exact.numerator}}}{{{exact.denominator}}}}}"


def _settled(found: Any) -> Any:
    """Resolve what the parser leaves open: the imaginary unit, undefined functions, sums and integrals."""
    if isinstance(found, sympy.MatrixBase) or getattr(found, "is_Matrix", False):
        found = found.doit()
        return found.as_immutable().applyfunc(_settled) if isinstance(found, sympy.MatrixBase) else None
    if not isinstance(found, sympy.Expr):
        return None
    found = found.xreplace({symbol: sympy.I for symbol in found.free_symbols if symbol.name in ("i", "imath")})
    found = found.replace(_is_odd_root, _real_root)
    applied = sorted(found.atoms(AppliedUndef), key=str)
    found = found.xreplace({each: sympy.Symbol(str(each.doit()), real=True) for each in applied})
    if found.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit, sympy.UnevaluatedExpr):
        found = found.doit()
    return None if found.has(sympy.nan, sympy.zoo) else found


def _is_odd_root(part: Any) -> bool:
    return bool(part.is_Pow and part.exp.is_Rational and part.exp.q % 2 and part.exp.q > 1 and part.base.is_negative)


def _real_root(part: Any) -> Any:
    """The real root of a negative number, as in textbooks: the cube root of -8 is -2."""
    return (-1) ** part.exp.p * sympy.Pow(-part.base, part.exp)


def same_value(a: Any, b: Any, written: int = 0) -> bool:
    """Whether two expressions are equal at every point at which both have a value, and there are enough such points."""
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or a.has(sympy.oo) or b.has(sympy.oo):
        return False
    difference = sympy.Add(a, sympy.Mul(-1, b, evaluate=False), evaluate=False)
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    seen = 0
    for number, scale in enumerate(SCALES if symbols else (1,)):
        # Irregular rationals of either sign, so that no identity of integers or of positive numbers passes.
        point = {
            symbol: sympy.Rational((-1) ** (number + i // 2) * scale * (97 + 41 * i), 89 + 13 * number)
            for i, symbol in enumerate(symbols)
        }
        verdict = _is_zero_at(difference, a, point, written)
        if verdict is False:
            return False
        seen += verdict is True
    return seen >= (2 if symbols else 1)


def _is_zero_at(difference: Any, side: Any, point: dict[Any, Any], written: int) -> bool | None:
    """Whether a difference is zero at a point, or None if it has no value there."""
    options = {"subs": point} if point else {}
    size = abs(side.evalf(3, **options))
    if not size.is_Float and not size.is_Rational:
        return None
    magnitude = max(0, int(sympy.log(size, 10).evalf(3))) if size else 0
    if not point:
        magnitude = min(3 * magnitude, magnitude + 1000)  # digits that cancel in 10^100 - sqrt(10^200 + 1)
    digits = EXTRA_DIGITS + written + magnitude
    found = difference.evalf(2, maxn=digits, **options)
    parts = found.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    # SymPy rounds a point before it evaluates there, so the last digits are noise.
    rounding = (size or 1) * sympy.Float(10) ** (GUARD_DIGITS - digits) if point else 0
    return all(part == 0 or (part.is_Float and part._prec == 1) or abs(part) < rounding for part in parts)
