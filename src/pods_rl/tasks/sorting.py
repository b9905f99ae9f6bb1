"""Sorting: put integers in ascending order. Generated; its reward is the share of positions that are right."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from .base import Task
from .procedural import Problem, procedural_task

# fewest and most integers, and the largest of them
_LEVELS = {"easy": (4, 6, 99), "mixed": (4, 10, 999), "hard": (10, 16, 999)}


def sorting_task(settings: Mapping[str, Any]) -> Task:
    """Generate lists of distinct integers to sort; the gold answer is the sorted list, separated by spaces.

    The answer is decided by the reward `positions`, the share of positions that hold the right integer. Rewards
    between 0 and 1 are where max-variance keeps other rollouts than a split into right and wrong would. Train and
    test are disjoint over all seeds.

    >>> task = sorting_task({"task_difficulty": "easy", "task_train_size": 2, "task_test_size": 1})
    >>> task.train[0]["answer"]
    '5 33 53 65 97'
    """
    return procedural_task("sorting", settings, _draw, number=1, answer="positions")


def _draw(rng: random.Random, difficulty: str) -> Problem:
    fewest, most, largest = _LEVELS[difficulty]
    numbers = rng.sample(range(largest + 1), rng.randint(fewest, most))
    question = f"Sort these integers in ascending order, and separate them by spaces: {' '.join(map(str, numbers))}"
    return question, " ".join(map(str, sorted(numbers)))
