"""The scorers of reasoning-gym's data sets, as the work of processes that are killed when they hang.

A gold answer names its problem, `292 (problem 7)`, so that the scorer can read the problem's own data.
"""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy
from functools import lru_cache
from importlib import import_module

from ..errors import UserError
from ..sandbox.worker import Work
from .answers import extract_answer

_NUMBERED = re.compile(r"(.*) \(problem (\d+)\)", re.DOTALL)


def numbered(answer: object, row: int) -> str:
    """Return the gold answer of a problem, if it has one, with the problem's number; `unnumbered` is the inverse.

    >>> unnumbered(numbered("292", 7))
    ('292', 7)
    """
    return f"{'' if answer is None else answer} (problem {row})"


def unnumbered(gold: str) -> tuple[str, int]:
    """Return the answer and the problem's number in a gold answer; raise UserError if there is no number."""
    found = _NUMBERED.fullmatch(gold)
    if found is None:
        raise UserError(f"the gold answer {gold[:80]!r} names no problem; expected one such as '292 (problem 7)'")
    return found[1], int(found[2])


def scoring(given: str) -> Work:
    """Return the work of a process: score the extracted answer of a text with the scorer of the gold answer's problem.

    While it scores, no text can be run as code: a scorer that calls `eval` on an answer fails, and the answer scores 0,
    as does every other one that makes the scorer raise.

    Args:
        given: JSON of the data set's name and the keywords that make it.
    """
    name, keywords = json.loads(given)
    source = import_module("reasoning_gym").create_dataset(name, **keywords)
    first, locked = source[0], False
    source.score_answer(first["answer"], first)  # what the scorer imports when first called is imported here

    def forbid_code(event: str, given: tuple[object, ...]) -> None:
        if locked and event == "exec" and str(getattr(given[0], "co_filename", "<")).startswith("<"):
            raise RuntimeError("a scorer must not run an answer as code")

    problem_at = lru_cache(1024)(source.__getitem__)  # rollouts of a group share theirs, and some take seconds to make

    def mark(pair: tuple[str, str]) -> float:
        nonlocal locked
        answer, (_, row) = extract_answer(pair[0]), unnumbered(pair[1])
        if answer is None:
            return 0.0
        problem = deepcopy(problem_at(row))
        locked = True
        try:
            return float(source.score_answer(answer, problem))
        except Exception:
            return 0.0
        finally:
            locked = False

    return Work(mark, prepare=lambda: sys.addaudithook(forbid_code))
