"""Tell names of quantities from expressions: `x`, `f(x)` and `Total cost` are names, `2x` and `x+y` are not."""

from __future__ import annotations

import re

from .molecules import is_word
from .notation import GREEK

_SYMBOL = (
    r"(?:[A-Za-z]"  # x
    r"|[A-Z]{2,5}"  # AB
    rf"|\\(?:ell|(?:var)?(?:{GREEK.replace(' ', '|')}))(?![a-z])"  # \theta
    r"|\\(?:vec|bar|hat|overline|tilde|dot|overrightarrow|mathbf|mathcal)\s*\{[^{}]*\})"  # \vec{v}
    r"(?:\s*_\s*(?:\{[^{}]*\}|[A-Za-z0-9]))?'*"  # x_1, f'
)
_ARGUMENT = rf"\s*(?:-\s*)?(?:[0-9]+(?:\.[0-9]+)?|{_SYMBOL})\s*"
_QUANTITY = re.compile(
    r"\s*(?:\|\s*[A-Z]{2,5}\s*\|"  # |AB|
    r"|\\[dtc]?frac\s*\{\s*(?:[A-Z]{1,5}\s*\}\s*\{\s*[A-Z]{1,5}|d[a-z]\s*\}\s*\{\s*d[a-z])\s*\}"  # \frac{AB}{CD}
    rf"|(?:m?\s*\\angle\s*)?{_SYMBOL}"  # \angle A
    rf"(?:\s*\^\s*\{{\s*-1\s*\}}(?=\s*\())?(?:\s*\({_ARGUMENT}(?:,{_ARGUMENT})*\))?)\s*:?\s*"  # f^{-1}(x, 2)
)
_PHRASE = re.compile(
    r"\s*(?!(?i:.*(?:\b(?:not|never|nor|cannot|sin|cos|tan|cot|sec|csc|log|exp|sqrt)\b|n't)))"
    r"[A-Za-z]{3,}(?:[\s'-]+[A-Za-z]+)*\s*:?\s*"
)

_LEAD_IN = re.compile(  # "Thus the answer is"
    r"^\s*(?:(?:so|thus|hence|therefore|then|finally|and|the|our|final|answer|value|sum|is|of|that|we|get|have|find)"
    r"(?![A-Za-z])[\s:,]*)*",
    re.IGNORECASE,
)
_FACTOR = re.compile(r"\s*[0-9]{1,4}\s*(?:\\cdot(?![a-z])|\*)?\s*(?=[A-Za-z\\])")  # 100 of 100p
_LETTERS_MULTIPLIED = re.compile(  # mn, m \cdot n
    r"\s*[a-z](?:(?:\s*(?:\\cdot(?![a-z])|\\times(?![a-z])|\*)\s*)?[a-z]){1,3}\s*"
)


def is_name(text: str) -> bool:
    """Whether a `plain` text names one quantity: a variable, a function of some, segments, or words."""
    return bool(_QUANTITY.fullmatch(text) or _PHRASE.fullmatch(text))


def is_asked_for(text: str) -> bool:
    r"""Whether a `plain` text combines names as questions do that ask for one number: `m+n`, `100p+q`, `a-b`, `mn`.

    Equations that more often state a problem (`2x`, `5x-7y`, `x^2+y^2`) are not.

    >>> [is_asked_for(text) for text in ("m+n", "100p+q", "f(1)+f(2)", "a-b", "mn", "Thus m+n")]
    [True, True, True, True, True, True]
    >>> [is_asked_for(text) for text in ("2x", "5x-7y", "x^2+y^2", "m", "5+3", "not m+n")]
    [False, False, False, False, False, False]
    """
    text = _LEAD_IN.sub("", text, count=1)
    if _LETTERS_MULTIPLIED.fullmatch(text):
        return not is_word(text.strip())
    terms = re.split("[+-]", text)
    if len(terms) < 2:
        return False
    names = [_FACTOR.sub("", term, count=1) for term in terms]
    if not all(map(is_name, names)):
        return False
    # a difference with coefficients is an equation of the problem: 5x-7y = 1
    return "-" not in text or names == terms
