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
from .extraction import extract_answer

_NUMBERED = re.compile(r"(.*) \(problem (\d+)\)", re.DOTALL)  # 292 (problem 7)
_KEPT_PROBLEMS = 1024


def numbered(answer: object, row: int) -> str:
    """Return the gold answer of a problem, if it has one, with the problem's number; `unnumbered` is the inverse.

    >>> unnumbered(numbered("292", 7))
    ('292', 7)
    """
    if answer is None:
        answer = ""
    return f"{answer} (problem {row})"


def unnumbered(gold: str) -> tuple[str, int]:
    """Return the answer and the problem's number in a gold answer; raise UserError if there is no number."""
    match = _NUMBERED.fullmatch(gold)
    if match is None:
        raise UserError(f"the gold answer {gold[:80]!r} names no problem; expected one such as '292 (problem 7)'")
    return match[1], int(match[2])


def gym_scoring(data_set: str) -> Work:
    """Return the work of a process: score the extracted answer of a text with the scorer of the gold answer's problem.

    While it scores, no text can be run as code: a scorer that calls `eval` on an answer fails, and the answer scores 0,
    as does every other one that makes the scorer raise.

    Args:
        data_set: JSON of the data set's name and the keywords that make it.
    """
    name, keywords = json.loads(data_set)
    source = import_module("reasoning_gym").create_dataset(name, **keywords)
    first_problem = source[0]
    source.score_answer(first_problem["answer"], first_problem)  # so that it imports now what it needs
    is_scoring = False

    def forbid_code(event: str, arguments: tuple[object, ...]) -> None:
        if not is_scoring or event != "exec":
            return
        file_name = str(getattr(arguments[0], "co_filename", "<"))
        if file_name.startswith("<"):  # <string>: code that was not read from a file
            raise RuntimeError("a scorer must not run an answer as code")

    # rollouts of a group share their problem, and some take seconds to make
    problem_at = lru_cache(_KEPT_PROBLEMS)(source.__getitem__)

    def score(pair: tuple[str, str]) -> float:
        nonlocal is_scoring
        text, gold = pair
        answer = extract_answer(text)
        _, row = unnumbered(gold)
        if answer is None:
            return 0.0
        problem = deepcopy(problem_at(row))  # a scorer may change it
        is_scoring = True
        try:
            return float(source.score_answer(answer, problem))
        except Exception:
            return 0.0
        finally:
            is_scoring = False

    return Work(score, prepare=lambda: sys.addaudithook(forbid_code))
