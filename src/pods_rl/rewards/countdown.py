"""Reach a number by arithmetic on given ones: the expression is parsed here, in exact fractions, never evaluated."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from .extract import extract_answer

MAX_LENGTH = 400  # characters of an expression: bounds depth, size of numbers and time
USES_THE_NUMBERS = Fraction(1, 10)  # partial credit: every number once, however far off
CLOSENESS = Fraction(1, 5)  # and up to so much more the nearer the target

_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DRESS = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ()\[\]]|[$`]")
_TIMES = re.compile(r"\\(?:times|cdot)(?![a-z])|(?<=[0-9)\s])[xX](?=[0-9(\s])")
_SIGNS = str.maketrans("×·∗÷∶−–[]{}", "***//--()()")
_IMPLICIT = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_UNSIGNED = r"[0-9]{1,100}(?:\.[0-9]{1,100})?"
_TOKEN = re.compile(rf"\s*(?:({_UNSIGNED})|([-+*/()]))")
_NUMBER = re.compile(rf"-?{_UNSIGNED}")
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


def countdown(text: str, gold: str) -> float:
    r"""Give 1.0 if the final answer of `text` makes the target from the given numbers, a little if it only uses them.

    Source: arXiv 2504.13818 asks for verifiable rewards; this one is graded, so that max-variance has more than two
    values to choose from. Range [0, 1].

    `text` is a completion, its answer found by `extract_answer`; `gold` is one right expression: its numbers are the
    given ones and its value is the target. Read are numbers, `+ - * / ( )`, `× ÷` and their LaTeX; a trailing `= 24`
    must be true. An answer with exactly the given numbers but another value v scores 0.1 + 0.2 / (1 + |v - target|),
    so 0.2 where it is off by one and 0.1 far away; anything else scores 0.0.

    >>> countdown("<answer>(5 - 1) * 6 = 24</answer>", "6*(5-1)"), countdown(r"\boxed{5 \times 6 - 1}", "6*(5-1)")
    (1.0, 0.1333)
    >>> countdown("<answer>4 * 6</answer>", "6*(5-1)")
    0.0
    """
    answer = extract_answer(text)
    if answer is None or len(answer) > MAX_LENGTH:
        return 0.0
    wanted, found = read_expression(gold), read_expression(answer)
    if wanted is None or found is None or wanted[1] != found[1]:
        return 0.0
    miss = abs(found[0] - wanted[0])
    return 1.0 if miss == 0 else round(float(USES_THE_NUMBERS + CLOSENESS / (1 + miss)), 4)


def read_expression(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Give the exact value of an expression and how often it uses each number, or None where it is none.

    An equation with a bare number on one side counts where it is true. Division by zero has no value. Time and
    memory are linear in the length, which `countdown` bounds; there is no recursion.

    >>> value, numbers = read_expression("(1 + 2) / 6"); value, sorted(numbers.elements())
    (Fraction(1, 2), [Fraction(1, 1), Fraction(2, 1), Fraction(6, 1)])
    >>> read_expression("2 + 2 = 5") is None, read_expression("2 **  3") is None
    (True, True)
    """
    sides = [side.strip() for side in _plain(text).split("=")]
    if len(sides) > 2:
        return None
    if len(sides) == 2 and not _NUMBER.fullmatch(sides[1]):
        sides.reverse()
    read = _evaluate(sides[0])
    if read is None or len(sides) == 1:
        return read
    claimed = _NUMBER.fullmatch(sides[1])
    return read if claimed and Fraction(claimed[0]) == read[0] else None


def _plain(text: str) -> str:
    text = text.strip().removesuffix(".")
    if text.startswith("**") and text.endswith("**"):
        text = text[2:-2]
    text = _THOUSANDS.sub("", _DRESS.sub("", _FRACTION.sub(r"((\1)/(\2))", text)))
    text = _TIMES.sub("*", text.replace(r"\div", "/")).translate(_SIGNS)
    return _IMPLICIT.sub("*", text).strip()


def _evaluate(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    """Operator precedence with two stacks: the values so far and the operators that wait for their second one."""
    values: list[Fraction] = []
    waiting: list[str] = []
    numbers: Counter[Fraction] = Counter()
    position, wants_value = 0, True
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
        number, sign = token.groups()
        if wants_value != bool(number or sign == "(" or (sign == "-" and wants_value)):
            return None
        if number:
            values.append(Fraction(number))
            numbers[values[-1]] += 1
            wants_value = False
        elif wants_value:
            waiting.append("negate" if sign == "-" else sign)
        elif not _close(values, waiting, sign):
            return None
        else:
            wants_value = sign != ")"
    whole = not wants_value and _apply_from(values, waiting, 0) and not waiting
    return (values[0], numbers) if whole else None


def _close(values: list[Fraction], waiting: list[str], sign: str) -> bool:
    """Apply what binds at least as tightly as this operator, or back to the opening bracket; False: impossible."""
    if not _apply_from(values, waiting, _RANK.get(sign, 0)):
        return False
    if sign != ")":
        waiting.append(sign)
        return True
    return bool(waiting) and waiting.pop() == "("


def _apply_from(values: list[Fraction], waiting: list[str], rank: int) -> bool:
    while waiting and waiting[-1] != "(" and _RANK[waiting[-1]] >= rank:
        sign, last = waiting.pop(), values.pop()
        if sign == "/" and last == 0:
            return False
        values.append(-last if sign == "negate" else _APPLY[sign](values.pop(), last))
    return True
