r"""Compare two answers as mathematics, without rounding. Runs in a verifier process.

The parser behind math-verify reads expressions and SymPy evaluates them. Two are equal if their difference is zero to
`EXTRA_DIGITS` more digits than are written, at several points of their variables. math-verify's own `verify` rounds
(0.333333 equals 1/3), takes the last side of any equation and ignores case and units, so it does not decide here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from sympy.core.function import AppliedUndef

from .notation import BRACKETS, Node, named, structure
from .numeric import Number, read_number, read_number_in_words

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

# -- values -----------------------------------------------------------------------------------------------------------

_SYMBOLS = ConversionConfig(lowercase_symbols=False)
_REPAIRS = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
_PART = r"(\{[^{}]*\}|\\[A-Za-z]+|[0-9A-Za-z])"
_DECIMAL = re.compile(r"(?<![\w.])([0-9]*)\.([0-9]+)|(?<![\w.])([0-9]+)\.(?![0-9])")
_MIXED = re.compile(
    r"(?<![\w.)}^/_])([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.])|\s*\\frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\})"
)
_OF_INTEGERS: dict[str, Callable[..., int]] = {"gcd": gcd, "lcm": lcm, "min": min, "max": max}
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"([A-Za-z}])('+)", lambda prime: f"{prime[1]}_{{{'p' * len(prime[2])}}}"),
    (r"\\?(?:operatorname\{)?(gcd|lcm|min|max)\}?\s*\(([-0-9,\s]+)\)",
     lambda call: str(_OF_INTEGERS[call[1]](*map(int, call[2].split(","))))),
    (r"(?:\{\s*\})?[_^]\{?(\w+)\}?\s*C_\{?(\w+)\}?|(?<![A-Za-z])C\((\w+),\s*(\w+)\)|\{?([^{}]*)\\choose([^{}]*)\}?",
     lambda choose: r"\binom" + _braced(choose.groups())),
    (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
    (r"\\sqrt\s*(\[[^\]]*\])\s*([A-Za-z0-9])(?![A-Za-z0-9.])", r"\\sqrt\1{\2}"),
    (r"(?<![A-Za-z\\])\\?sqrt\s*(\[[^\]]*\]|)\s*(?:\(([^()]*)\)|([0-9.]+|\\?[A-Za-z]+))", r"\\sqrt\1{\2\3}"),
    (rf"\\[dtc]?(frac|binom)\s*{_PART}\s*{_PART}", lambda pair: rf"\{pair[1]}" + _braced(pair.groups()[1:])),
    (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r"\\cdot "),
    (r"(?<=[_^])\s*([0-9A-Za-z])(?=[ _^\\])", r"{\1}"),
    (r"(?<![\\A-Za-z])(a?r?c?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|pi|infty|inf)(?![A-Za-z])", r"\\\1"),
]  # fmt: skip
_HALF = re.compile(r"(?<![\w.)}/^])(?<!\^ )([0-9]+)\s*/\s*([0-9]+)(?=\s*(?:[A-Za-z(]|\\[a-z]))")  # 1/2x is half of x
_UNREADABLE = re.compile(r"[0-9]\s+[0-9]|[-+]\s*[-+]|[0-9}]\s*_|[%:,;]|^\s*$|[-+*/^=]\s*$|^\s*[*/^=]")
_UNFINISHED = re.compile(r"\.\.|\\[lc]?dots|\\not(?![a-z])")


def _braced(parts: Iterable[str | None]) -> str:
    return "".join(part if part[0] == "{" else f"{{{part}}}" for part in parts if part)


def _number(text: str) -> Number | None:
    return read_number(text) or (read_number_in_words(text) if re.search(r"\s[A-Za-z]{2}|^[A-Za-z]{3}", text) else None)


@lru_cache(maxsize=256)
def value(text: str) -> Any:
    """Parse an expression into an exact SymPy expression or matrix, with `i` as the imaginary unit, or None."""
    number = _number(text)
    if number and number.bound:
        return None
    if number:
        return sympy.Rational(number.fraction.numerator, number.fraction.denominator)
    if _UNFINISHED.search(text):
        return None
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = normalize_latex(text, _REPAIRS)
    if _UNREADABLE.search(_MIXED.sub("1", text)):
        return None
    text = _HALF.sub(r"\\frac{\1}{\2}", _MIXED.sub(_improper, text))
    try:
        return _settled(
            latex2sympy(
                _DECIMAL.sub(_exact_decimal, text), is_real=True, normalization_config=None, conversion_config=_SYMBOLS
            )
        )
    except MemoryError:
        raise
    except Exception:
        return None


def _improper(mixed: re.Match[str]) -> str:
    units, top, bottom = (int(part) for part in mixed.groups() if part)
    return rf"{{\frac{{{units * bottom + top}}}{{{bottom}}}}}"


def _exact_decimal(match: re.Match[str]) -> str:
    exact = Fraction(match[0] if match[0][-1] != "." else match[0][:-1])
    return rf"{{\frac{{{exact.numerator}}}{{{exact.denominator}}}}}"


def _settled(found: Any) -> Any:
    """Resolve what the parser leaves open: the imaginary unit, undefined functions, sums and integrals."""
    if getattr(found, "is_Matrix", False):
        found = found.doit()
        return found.as_immutable().applyfunc(_settled) if isinstance(found, sympy.MatrixBase) else None
    if not isinstance(found, sympy.Expr):
        return None
    found = found.xreplace({symbol: sympy.I for symbol in found.free_symbols if symbol.name in ("i", "imath")})
    found = sympy.real_root(found)  # as in textbooks: the cube root of -8 is -2
    applied = sorted(found.atoms(AppliedUndef), key=str)
    found = found.xreplace({each: sympy.Symbol(str(each.doit()), real=True) for each in applied})
    found = found.doit()
    return None if found.has(sympy.nan, sympy.zoo) else found


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
    verdicts = []
    for point in _points(symbols):
        verdicts.append(_is_same_number(a.xreplace(point), b.xreplace(point), written, cancels=False))
        if verdicts[-1] is False:
            return False
    return verdicts.count(True) >= 2


def _points(symbols: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Yield irregular rationals of either sign, so that no identity of integers or of positive numbers passes."""
    count = FEW_POINTS if len(symbols) < 3 else len(SCALES)
    for number, scale in enumerate(SCALES[:count]):
        yield {
            symbol: sympy.Rational(_sign(number, i) * scale * (97 + 41 * i * i), 89 + 13 * number)
            for i, symbol in enumerate(symbols)
        }


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
    enough = ENOUGH_REAL_POINTS[min(len(symbols), 3) - 1]
    agreed = 0
    for point in _real_points(symbols, has_powers=any(part.is_Pow and part.exp.free_symbols for part in parts)):
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
    sizes = SIZES
    if has_powers:
        sizes = SMALL_SIZES
    else:
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
    found = []
    for part in sympy.preorder_traversal(expression):
        if not getattr(part, "free_symbols", None):
            continue
        if isinstance(part, _PARTLY_REAL) or (part.is_Pow and not part.exp.is_Integer and not _is_real_power(part)):
            found.append(part)
    return found


def _is_real_power(power: Any) -> bool:
    """Whether a power is real wherever its exponent is: of a positive number, or of an absolute value."""
    return bool(power.base.is_positive) or isinstance(power.base, sympy.Abs)


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
    digits = EXTRA_DIGITS + written + (min(3 * magnitude, magnitude + 1000) if cancels else magnitude)
    parts = sympy.Add(a, -b, evaluate=False).evalf(2, maxn=digits, subs=point).as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    noise = (size or 1) * sympy.Float(10) ** (GUARD_DIGITS - digits)
    return all(part == 0 or (part.is_Float and part._prec == 1) or abs(part) < noise for part in parts)


# -- comparison -------------------------------------------------------------------------------------------------------

_LITERAL = {
    r"\mathbb{R}": "Reals", r"\mathbb{Z}": "Integers", r"\mathbb{N}": "Naturals", r"\mathbb{Q}": "Rationals",
    r"\emptyset": "EmptySet", r"\varnothing": "EmptySet", r"\{\}": "EmptySet",
}  # fmt: skip
_RELATIONS: dict[str, Callable[..., Any]] = {
    "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "!=": sympy.Ne, "=": sympy.Eq,
}  # fmt: skip


def equal(gold: str, answer: str) -> bool:
    r"""Whether two answers, in the notation of `plain`, are equal.

    >>> equal(r"2\sqrt{2}", r"\sqrt{8}"), equal("x<3", r"(-\infty, 3)"), equal("x=5", "5"), equal("x+y=5", "5")
    (True, True, True, False)
    """
    return _same(structure(gold), structure(answer))


def _same(gold: Node, answer: Node) -> bool:
    if gold == answer:
        return True
    if gold.kind == answer.kind == "relation":
        return _same_relation(gold, answer)
    if "relation" in (gold.kind, answer.kind):
        stated = _stated(gold), _stated(answer)
        return _same(*stated) if stated != (gold, answer) else _same_set(gold, answer)
    if "base" in (gold.kind, answer.kind):  # a numeral in a base equals only itself
        return False
    if gold.kind == answer.kind == "value":
        return _same_expression(gold.text, answer.text) or _same_set(gold, answer)
    return _same_group(gold, answer) or _same_set(gold, answer)


def _same_expression(gold: str, answer: str) -> bool:
    if "".join(gold.split()) == "".join(answer.split()) and not re.search(r"[0-9]\s+[0-9]", gold + "|" + answer):
        return True
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


def _stated(node: Node) -> Node:
    """Return the value of an equation that states one: of a name (`x = 5`), or worked arithmetic that is true."""
    if not node.equation:
        return node
    values = _values(node.items) or [sympy.Symbol("unread")]
    closed = "in" not in node.signs and not any(side.free_symbols for side in values)
    if named(node) is not None or (closed and all(same_value(*pair) for pair in pairwise(values))):
        return node.items[-1]
    return node


def _same_group(gold: Node, answer: Node) -> bool:
    if "value" in (gold.kind, answer.kind):  # the one element of a set
        group, other = (answer, gold) if gold.kind == "value" else (gold, answer)
        return group.kind == "set" and len(group.items) == 1 and not _is_region(other) and _same(group.items[0], other)
    kinds = {gold.kind, answer.kind}
    ours, theirs = gold.items, answer.items
    if (_is_set(gold) or _is_set(answer)) and not kinds & {*BRACKETS, "union", "minus", "cap"}:
        return _covers(ours, theirs) and _covers(theirs, ours)
    if len(ours) != len(theirs):
        return False
    if kinds & {*BRACKETS, "ratio"}:
        brackets = kinds - {"list", "and", "or"}
        alike = len(brackets) == 1 and (len(kinds) == 1 or brackets == {"()"} or len(ours) > 2)
        points = len(ours) > 2 and kinds == {"()", "[]"}
        return (alike or points) and all(map(_same, ours, theirs))
    if kinds & {"union", "minus", "cap"}:
        return kinds in ({"union"}, {"cap"}) and _match_up(ours, theirs, _same)
    if len(kinds) > 1 and any(item.kind == "relation" and not item.equation for item in (*ours, *theirs)):
        return False  # x > 2 and x < 5 is not x > 2 or x < 5
    relations = all(item.kind == "relation" for item in (*ours, *theirs))
    if not relations and (_names_vary(ours) or _names_vary(theirs)):
        return all(map(_same, ours, theirs))  # by names if both lists have them, else by order
    return _match_up(ours, theirs, _same)


def _is_set(group: Node) -> bool:
    """Whether duplicate items count once: in a set or a list of points, not in a list of roots."""
    return group.kind == "set" or all(item.kind not in ("value", "relation") for item in group.items)


def _names_vary(items: Sequence[Node]) -> bool:
    names = {re.sub(r"_.*", "", name) if (name := named(item)) else None for item in items}  # x_1 and x_2 are alike
    return len(names) > 1 and None not in names


def _match_up(ours: Sequence[Any], theirs: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether every item of the one is the same as an item of the other, each used once."""
    left = list(theirs)
    for item in ours:
        match = next((other for other in left if same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _covers(ours: Sequence[Node], theirs: Sequence[Node]) -> bool:
    return all(any(_same(item, other) for other in theirs) for item in ours)


def _values(items: Sequence[Node]) -> list[Any] | None:
    found = [value(item.text) if item.kind == "value" else None for item in items]
    return None if any(each is None for each in found) else found


def _same_relation(gold: Node, answer: Node) -> bool:
    name = named(gold)
    if name is not None and name == named(answer):
        return _same(gold.items[-1], answer.items[-1])
    ours, theirs = _differences(gold), _differences(answer)
    if ours and theirs and len(ours) == len(theirs) and _match_up(ours, theirs, _proportional):
        return True
    return _same_set(gold, answer)


def _differences(relation: Node) -> list[tuple[str, Any]] | None:
    """For each sign of a chain, `=`, `!=`, `<` or `<=`, and the expression that is compared with zero."""
    sides = _values(relation.items)
    if sides is None or "in" in relation.signs or any(isinstance(side, sympy.MatrixBase) for side in sides):
        return None
    return [
        (sign.replace(">", "<"), right - left if sign.startswith(">") else left - right)
        for sign, (left, right) in zip(relation.signs, pairwise(sides), strict=True)
    ]


def _proportional(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    """Whether two expressions are equal up to a constant factor, a positive one for an inequality."""
    (sign, gold), (other_sign, answer) = ours, theirs
    symbols = gold.free_symbols
    if sign != other_sign or not symbols or symbols != answer.free_symbols:
        return False
    point = {symbol: sympy.Rational(7 * i + 3, 5) for i, symbol in enumerate(sorted(symbols, key=str))}
    scales = gold.xreplace(point), answer.xreplace(point)
    if any(not scale.is_number or same_value(scale, sympy.Integer(0)) for scale in scales):
        return False
    return (sign in ("=", "!=") or sympy.N(scales[0] / scales[1]) > 0) and same_value(
        gold * scales[1], answer * scales[0]
    )


def _same_set(gold: Node, answer: Node) -> bool:
    """Compare as sets of real numbers, if both are more than a list: `x < 3` is `(-\\infty, 3)`."""
    if not (_is_region(gold) and _is_region(answer)) or len(_variables(gold) | _variables(answer)) > 1:
        return False
    sets = _set(gold), _set(answer)
    if None in sets:
        return False
    return bool(sets[0] == sets[1] or sets[0].symmetric_difference(sets[1]).is_empty)


def _is_region(node: Node) -> bool:
    if node.kind == "value":
        return "".join(node.text.split()) in _LITERAL
    if node.kind == "relation":
        return not node.equation or "in" in node.signs
    if node.kind in (*BRACKETS, "set", "union", "minus", "cap"):
        return True
    return any(item.kind != "()" and _is_region(item) for item in node.items)  # (1,4), (2,3) are two points


def _variables(node: Node) -> set[str]:
    if node.kind == "relation":
        name = named(node)
        return {name} if name is not None else {str(s) for side in _values(node.items) or () for s in side.free_symbols}
    return {name for item in node.items for name in _variables(item)}


def _set(node: Node) -> Any:
    if node.kind == "relation":
        if node.equation and named(node) is not None:
            return _set(node.items[-1])
        sides = _values(node.items)
        if sides is None or "in" in node.signs:
            return None
        relations = [_RELATIONS[sign](*pair) for sign, pair in zip(node.signs, pairwise(sides), strict=True)]
        return sympy.Intersection(*(relation.doit().as_set() for relation in relations))
    if node.kind == "value":
        name = _LITERAL.get("".join(node.text.split()))
        found = value(node.text)
        return getattr(sympy.S, name) if name else None if found is None else sympy.FiniteSet(found)
    if node.kind in BRACKETS and len(node.items) == 2:
        ends = _values(node.items)
        if ends is None or (ends[0] < ends[1]) != True:  # noqa: E712 - SymPy's answer may be neither
            return None
        return sympy.Interval(*ends, left_open=node.kind[0] == "(", right_open=node.kind[1] == ")")
    parts = [_set(item) for item in node.items]
    if node.kind in BRACKETS or None in parts or (node.kind == "set" and any(map(_is_region, node.items))):
        return None
    if node.kind == "minus":
        return sympy.Complement(*parts)
    conditions = node.kind in ("and", "list") and all(item.kind == "relation" for item in node.items)
    together = sympy.Intersection(*parts)
    if node.kind != "cap" and not (conditions and not (node.kind == "list" and together.is_empty)):
        return sympy.Union(*parts)
    return together
