"""Countdown: write an expression that uses each number once and has a given value. Generated, needs no download."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from .base import Task
from .procedural import Problem, procedural_task

# fewest and most numbers, and the largest of them
_LEVELS = {"easy": (3, 3, 20), "mixed": (3, 4, 50), "hard": (4, 6, 99)}
_LARGEST_VALUE = 999  # of the target and of every step of the gold expression


def countdown_task(settings: Mapping[str, Any]) -> Task:
    """Generate countdown problems; the gold answer is one right expression, which uses every number once.

    The answer is decided by the reward `countdown`, which parses an expression and never evaluates it as code, and
    gives part of its marks for less than a right one. Train and test are disjoint over all seeds.

    >>> task = countdown_task({"task_train_size": 2, "task_test_size": 1})
    >>> print(task.train[0]["prompt"][1]["content"])
    Write an arithmetic expression that uses each of the numbers 3, 17, 27, 49 exactly once and has the value 8. \
Use only +, -, *, / and parentheses.
    """
    return procedural_task("countdown", settings, _draw, number=1, answer="countdown")


def _draw(rng: random.Random, difficulty: str) -> Problem:
    fewest, most, largest = _LEVELS[difficulty]
    numbers = [rng.randint(1, largest) for _ in range(rng.randint(fewest, most))]
    target, expression = combine(rng, numbers)
    # listed in order, so that a problem has one wording, and no seed tests what another trains on
    listed = ", ".join(map(str, sorted(numbers)))
    question = (
        f"Write an arithmetic expression that uses each of the numbers {listed} exactly once and has the value "
        f"{target}. Use only +, -, *, / and parentheses."
    )
    return question, expression


def combine(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
    """Join numbers by random operations to one expression; gives its value and its text.

    Every step is a whole number from 1 to 999.

    >>> combine(random.Random(0), [3, 7, 25])
    (172, '(25 * 7) - 3')
    """
    while True:
        parts = [(number, str(number)) for number in numbers]
        while len(parts) > 1 and parts[0][0] <= _LARGEST_VALUE:
            rng.shuffle(parts)
            parts = [_join(rng, *parts.pop(), *parts.pop()), *parts]
        value, text = parts[0]
        if len(parts) == 1 and value <= _LARGEST_VALUE:
            return value, text[1:-1]


def _join(rng: random.Random, a: int, left: str, b: int, right: str) -> tuple[int, str]:
    if a < b:
        a, left, b, right = b, right, a, left
    results = {"+": a + b, "*": a * b}
    if a > b:
        results["-"] = a - b
    if a % b == 0:
        results["/"] = a // b
    sign = rng.choice(sorted(results))
    return results[sign], f"({left} {sign} {right})"
