"""Tasks: prompts, gold answers, rewards and a grader, each with a version; made by `load_task`.

A task is one function of the settings and one entry in `TASKS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UserError
from ..rewards import get_reward
from .arithmetic import arithmetic_task
from .base import Grade, Task
from .files import dataset_task, gsm8k_task


def load_task(settings: Mapping[str, Any]) -> Task:
    """Make the task that a recipe describes. A setting that is absent or None is the task's own.

    `task` is a key of `TASKS` (default: `dataset` where `dataset_name` is given, else `arithmetic`);
    `task_rewards` maps names of rewards, or dotted paths, to weights, and replaces the task's own.
    Arithmetic reads `task_difficulty`, `task_train_size`, `task_test_size` and `task_seed`. The others read
    `dataset_name` (a local file or folder, or a hub id), `dataset_config`, `dataset_train_split`,
    `dataset_test_split`, `dataset_test_name` (where the test rows are elsewhere), `question_column`,
    `answer_column`, `answer_after` (the gold answer is what follows it), `system_prompt`, `prompt_style`
    (`chat`, `plain`), `task_train_size` and `task_test_size`.

    Raises UserError for an unknown task, an unknown reward, a weight that is no finite number, and whatever
    the task itself refuses.

    >>> load_task({"task": "arithmetic", "task_train_size": 4, "task_test_size": 2}).name
    'arithmetic'
    """
    name = settings.get("task") or ("dataset" if settings.get("dataset_name") else "arithmetic")
    if name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown task {name!r}; {hint}There are {', '.join(TASKS)}")
    task = TASKS[name](settings)
    weights = settings.get("task_rewards")
    return task if weights is None else dataclasses.replace(task, rewards=_checked(weights))


def _arithmetic(settings: Mapping[str, Any]) -> Task:
    keys = ("difficulty", "train_size", "test_size", "seed")
    given = {key: settings[f"task_{key}"] for key in keys if settings.get(f"task_{key}") is not None}
    try:
        return arithmetic_task(**given)
    except ValueError as error:
        raise UserError(str(error)) from error


def _checked(weights: object) -> dict[str, float]:
    if not isinstance(weights, Mapping) or not weights:
        raise UserError(
            f"task_rewards is {weights!r}; expected names and weights, as in {{accuracy: 1.0, format: 0.1}}"
        )
    for name, weight in weights.items():
        get_reward(name)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UserError(f"task_rewards: the weight of {name!r} is {weight!r}; expected a finite number")
    return {name: float(weight) for name, weight in weights.items()}


TASKS: dict[str, Callable[[Mapping[str, Any]], Task]] = {
    "arithmetic": _arithmetic,
    "gsm8k": gsm8k_task,
    "dataset": dataset_task,
}

__all__ = ["TASKS", "Grade", "Task", "load_task"]
