r"""Compare answers in mathematics: numbers, expressions, sets, units, options and formulas of chemistry.

`decide(answer, gold)` answers at once where no symbolic mathematics is needed, and returns the pair for `equal`
otherwise. `equal` loads SymPy and may take forever on a hostile answer, so call it in a process that has a time limit
(`rewards.verifier`). Other packages import from here only.

| module | content |
|---|---|
| `comparison` | `decide` |
| `equality`, `regions`, `identity`, `values` | `equal`: groups and relations, sets, expressions, parsing |
| `structure`, `names`, `assignments` | lists, sets, intervals and relations; names of quantities and coordinates |
| `functions` | maxima, greatest common divisors and double factorials |
| `congruences`, `parameters` | `5 \pmod 7`; `k \in \mathbb{Z}` |
| `notation` | one notation for all spellings |
| `units`, `unit_names`, `amounts` | units, currencies and what a number counts; `6 ft 2 in` |
| `codes`, `texts` | dates, ranges, scores and codes; lists of words |
| `numerals`, `words`, `bounds`, `arithmetic` | numbers in digits and in words, "at least 12", arithmetic |
| `molecules`, `choices` | chemical formulas; options such as (B), yes and no |
"""

from __future__ import annotations

from .choices import VERDICTS, read_letter, read_verdict
from .comparison import Pair, decide, same_text
from .molecules import is_formula
from .notation import MAX_LENGTH, plain
from .numerals import read_number


def equal(gold: str, answer: str) -> bool:
    r"""Whether two answers, in the notation of `plain`, are equal as mathematics. Loads SymPy.

    >>> equal(r"2\sqrt{2}", r"\sqrt{8}")
    True
    """
    from . import equality

    return equality.equal(gold, answer)


__all__ = [
    "MAX_LENGTH", "VERDICTS", "Pair", "decide", "equal", "is_formula", "plain", "read_letter",
    "read_number", "read_verdict", "same_text",
]  # fmt: skip
