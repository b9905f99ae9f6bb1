"""Is a chemical equation balanced, and is it the one that was asked for?"""

from __future__ import annotations

import re

from .choice import choice
from .extract import extract_answer
from .formulas import has_arrow, normalise, read_equation
from .numeric import MAX_LENGTH

_LEAD = re.compile(r".*(?:\bis\b|\bequation\b|[a-z]:)\s*:?", re.DOTALL)  # "The balanced equation is:"


def equation(text: str, gold: str) -> float:
    """Give 1.0 if the final answer of `text` is the equation `gold` in a balanced form, else 0.0.

    Source: arXiv 2504.13818, experiments in chemistry: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `text` is a completion, its answer found by `extract_answer`; `gold` is the balanced equation. Right is an answer
    that has the species of `gold` on each side, in any order and spelling (`HOH` is `H2O`; states do not count), and
    whose positive coefficients balance every element and the charge; they need not be the smallest. Where `gold`
    itself does not balance, its coefficients up to a common factor are asked for; where it is no equation, its text.

    >>> equation("<answer>2H2 + O2 -> 2H2O</answer>", "2H2(g) + O2(g) = 2H2O(l)")
    1.0
    >>> equation("<answer>H2 + O2 -> H2O2</answer>", "2H2 + O2 = 2H2O")
    0.0
    """
    answer, gold = extract_answer(text), gold.strip()
    if answer is None or not gold:
        return 0.0
    if answer == gold:
        return 1.0
    if len(answer) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return 0.0
    answer, wanted = _statement(answer), read_equation(gold)
    if wanted is None:
        return float(_squeezed(answer) == _squeezed(gold))
    found = read_equation(answer, like=wanted)
    if found is None or not found.same_species(wanted):
        return 0.0
    return float(found.balanced if wanted.balanced else found.proportional(wanted))


def chemistry(text: str, gold: str) -> float:
    """Grade by `equation` where `gold` holds an arrow or an equals sign, else by `choice`.

    Source: arXiv 2504.13818, experiments in chemistry: reward 1.0 for a right answer. Range {0.0, 1.0}.

    >>> chemistry("<answer>2H2 + O2 = 2H2O</answer>", "2H2 + O2 = 2H2O"), chemistry("<answer>(b)</answer>", "B")
    (1.0, 1.0)
    """
    return equation(text, gold) if has_arrow(gold) else choice(text, gold)


def _statement(answer: str) -> str:
    """The last line that holds an arrow, without the words before it and the full stop."""
    line = next((line for line in reversed(answer.splitlines()) if has_arrow(line)), answer)
    lead = _LEAD.match(line)
    return line[lead.end() if lead else 0 :].partition(", ")[0].strip().removesuffix(".")


def _squeezed(text: str) -> str:
    return "".join(normalise(text).split())
