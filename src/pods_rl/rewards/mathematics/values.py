"""Parse an expression into an exact SymPy expression. Runs in a verifier process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from sympy.core.function import AppliedUndef

from .arithmetic import sum_of_progression
from .functions import put_back, take_out
from .notation import GREEK
from .numerals import Number, read_number
from .structure import Node
from .words import read_number_in_words

_KEEPS_CASE = ConversionConfig(lowercase_symbols=False)
_REPAIRS = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")

# -- what the parser misreads ------------------------------------------------------------------------------------------


def _braced(parts: Iterable[str | None]) -> str:
    r"""Write parts as arguments of a command: `{1}{\pi}`."""
    return "".join(part if part[0] == "{" else f"{{{part}}}" for part in parts if part)


def _selection(written: re.Match[str]) -> str:
    """Write the number of combinations C or of arrangements A, P with factorials; others are powers of a variable."""
    numbers = [int(number) for number in re.findall("[0-9]+", written[0])]
    n, k = numbers if written[0].index("_") < written[0].index("^") else numbers[::-1]
    if k > n:
        return written[0]
    if written[1] == "C":
        return rf"\binom{{{n}}}{{{k}}}"
    return rf"\frac{{{n}!}}{{{n - k}!}}"


_GREEK = "|".join(GREEK.split())
_ANY_ARGUMENT = r"(\{[^{}]*\}|\\[A-Za-z]+|[0-9A-Za-z])"  # an argument with or without braces
_INDEX = r"\s*(?:\{\s*[0-9]{1,4}\s*\}|[0-9])\s*"
_SIDE = r"((?:[^{}]|\{[^{}]*\})*)"  # with one level of braces
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"([A-Za-z}])('+)", lambda primed: f"{primed[1]}_{{{'p' * len(primed[2])}}}"),  # f'
    (rf"(?<![A-Za-z\\])([CAP])\s*(?:_{_INDEX}\^{_INDEX}|\^{_INDEX}_{_INDEX})", _selection),  # C_5^2, A^2_5
    (rf"(?:\{{|^){_SIDE}\\over(?![A-Za-z]){_SIDE}(?:\}}|$)", r"{\\frac{\1}{\2}}"),  # {3 \over 4}
    (rf"^\{{(\\frac\{{{_SIDE}\}}\{{{_SIDE}\}})\}}$", r"\1"),  # the parser reads {1} as a set
    (
        r"(?:\{\s*\})?[_^]\{?(\w+)\}?\s*C_\{?(\w+)\}?"  # {}_5C_2, ^5C_2
        r"|(?<![A-Za-z])C\((\w+),\s*(\w+)\)"  # C(5, 2)
        r"|\{?([^{}]*)\\choose([^{}]*)\}?",  # {5 \choose 2}
        lambda choose: r"\binom" + _braced(choose.groups()),
    ),
    (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
    (r"\\sqrt\s*(\[[^\]]*\])\s*([A-Za-z0-9])(?![A-Za-z0-9.])", r"\\sqrt\1{\2}"),  # \sqrt[3]2
    (
        r"(?<![A-Za-z\\])\\?sqrt\s*(\[[^\]]*\]|)\s*(?:\(([^()]*)\)|([0-9.]+|\\?[A-Za-z]+))",  # sqrt(2), sqrt 2
        r"\\sqrt\1{\2\3}",
    ),
    (  # \frac12, \dfrac{1}2
        rf"\\[dtc]?(frac|binom)\s*{_ANY_ARGUMENT}\s*{_ANY_ARGUMENT}",
        lambda command: rf"\{command[1]}" + _braced((command[2], command[3])),
    ),
    (r"\^\s*(\\frac\{[^{}]*\}\{[^{}]*\})", r"^{\1}"),  # x^\frac{1}{2}
    (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r"\\cdot "),  # 3 x 10^8
    (r"(?<=[_^])\s*([0-9A-Za-z])(?=[ _^\\])", r"{\1}"),  # x^2 y
    (r"(?<![\\A-Za-z])Pi(?![A-Za-z])", r"\\pi"),
    (
        rf"(?<![\\A-Za-z])(a?r?c?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|pi|infty|hbar|ell|{_GREEK})(?![A-Za-z])",
        r"\\\1",  # sin x, theta
    ),
    (r"(?<![\\A-Za-z])[Ii]nf(?:inity)?(?![A-Za-z])", r"\\infty"),
]
_DECIMAL = re.compile(
    r"(?<![\w.])([0-9]*)\.([0-9]+)"  # 0.5, .5
    r"|(?<![\w.])([0-9]+)\.(?![0-9])"  # 5.
)
_MIXED = re.compile(
    r"(?<![\w.)}^/_])([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.])"  # 2 1/2
    r"|\s*\\frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\})"  # 2\frac{1}{2}
)
_HALF = re.compile(r"(?<![\w.)}/^])(?<!\^ )([0-9]+)\s*/\s*([0-9]+)(?=\s*(?:[A-Za-z(]|\\[a-z]))")  # 1/2x is half of x
_UNREADABLE = re.compile(
    r"[0-9]\s+[0-9]"  # 1 2
    r"|[-+]\s*[-+]"  # 1 +- 2
    r"|[0-9}]\s*_"  # 2_x
    r"|[%:,;]"
    r"|^\s*$"
    r"|[-+*/^=]\s*$"  # 1 +
    r"|^\s*[*/^=]"  # * 1
)
_UNFINISHED = re.compile(r"\.\.|\\[lc]?dots|\\not(?![a-z])")  # 1 + 2 + \dots
_MAY_BE_WORDS = re.compile(r"\s[A-Za-z]{2}|^[A-Za-z]{3}")  # 5 cm, twelve


def number(text: str) -> Number | None:
    """Return the number that a text is in digits, in words or with words around it, or None."""
    in_digits = read_number(text)
    if in_digits:
        return in_digits
    if _MAY_BE_WORDS.search(text):
        return read_number_in_words(text)
    return None


@lru_cache(maxsize=256)
def value(text: str) -> Any:
    """Parse an expression into an exact SymPy expression or matrix, with `i` as the imaginary unit, or None."""
    as_number = number(text)
    if as_number:
        if as_number.bound:
            return None
        return sympy.Rational(as_number.fraction.numerator, as_number.fraction.denominator)
    if _UNFINISHED.search(text):
        return sum_of_progression(text)
    taken_out = take_out(text, value)
    if taken_out is None:
        return None
    text, calls = taken_out
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = normalize_latex(text, _REPAIRS)
    if _UNREADABLE.search(_MIXED.sub("1", text)):
        return None
    text = _MIXED.sub(_improper, text)
    text = _HALF.sub(r"\\frac{\1}{\2}", text)
    try:
        # exact decimals, since the parser reads them as floats
        exact = _DECIMAL.sub(_exact_decimal, text)
        parsed = latex2sympy(exact, is_real=True, normalization_config=None, conversion_config=_KEEPS_CASE)
        return _settled(put_back(parsed, calls))
    except MemoryError:
        raise
    except Exception:  # the parser raises many kinds
        return None


def values_of(nodes: Sequence[Node]) -> list[Any] | None:
    """Return the value of each node, or None if one of them has none or is not an expression."""
    values = []
    for node in nodes:
        parsed = value(node.text) if node.kind == "value" else None
        if parsed is None:
            return None
        values.append(parsed)
    return values


def _improper(mixed: re.Match[str]) -> str:
    units, top, bottom = (int(part) for part in mixed.groups() if part)
    return rf"{{\frac{{{units * bottom + top}}}{{{bottom}}}}}"


def _exact_decimal(decimal: re.Match[str]) -> str:
    exact = Fraction(decimal[0].removesuffix("."))
    return rf"{{\frac{{{exact.numerator}}}{{{exact.denominator}}}}}"


def _settled(parsed: Any) -> Any:
    """Resolve what the parser leaves open: the imaginary unit, undefined functions, sums and integrals."""
    if getattr(parsed, "is_Matrix", False):
        matrix = parsed.doit()
        if not isinstance(matrix, sympy.MatrixBase):
            return None
        return matrix.as_immutable().applyfunc(_settled)
    if not isinstance(parsed, sympy.Expr):
        return None
    imaginary = [symbol for symbol in parsed.free_symbols if symbol.name in ("i", "imath")]
    expression = parsed.xreplace(dict.fromkeys(imaginary, sympy.I))
    expression = sympy.real_root(expression)  # as in textbooks: the cube root of -8 is -2
    applied = sorted(expression.atoms(AppliedUndef), key=str)  # f(2)
    expression = expression.xreplace({call: sympy.Symbol(str(call.doit()), real=True) for call in applied})
    expression = expression.doit().replace(sympy.Piecewise, _where_it_converges)
    if expression.has(sympy.nan, sympy.zoo):
        return None
    return expression


def _where_it_converges(*branches: Any) -> Any:
    """Return the closed form of an infinite sum, which SymPy gives for the points at which it converges."""
    last = branches[-1][0]
    if len(branches) == 2 and isinstance(last, (sympy.Sum, sympy.Integral)):
        return branches[0][0]
    return sympy.Piecewise(*branches)
