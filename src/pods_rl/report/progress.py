"""How far a run is that still trains: its clocks, and the share of its budget that it has used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..runs import Run
from .text import finite


@dataclass(frozen=True)
class Progress:
    """The latest clocks of a run and its budget. A missing number is NaN."""

    step: float
    seconds: float  # training clock
    max_steps: float
    max_seconds: float
    share: float  # of the budget that ends first
    reward: float  # of the latest step


def progress_of(run: Run) -> Progress:
    """Return how far a run is, by the newer of its status and its last logged step; damaged values count as missing."""
    last: Mapping[str, Any] = {}
    if run.metrics:
        last = run.metrics[-1]
    step = _larger(_number(run.status.get("step")), _number(last.get("step")))
    seconds = _larger(_number(run.status.get("seconds")), _number(last.get("seconds")))
    max_steps = _budget(run.config.get("max_steps"))
    max_seconds = _budget(run.config.get("max_seconds"))
    epochs = _budget(run.config.get("num_train_epochs"))
    share = _larger(step / max_steps, seconds / max_seconds)
    if math.isnan(share):
        share = _number(last.get("epoch")) / epochs
    return Progress(step, seconds, max_steps, max_seconds, min(share, 1.0), _number(last.get("reward")))


def _number(value: object) -> float:
    number = finite(value)
    if number is None:
        return math.nan
    return number


def _budget(value: object) -> float:
    """Return a limit; NaN if there is none, which -1 stands for too."""
    number = _number(value)
    if number > 0:
        return number
    return math.nan


def _larger(first: float, second: float) -> float:
    """Return the larger of two numbers; if one is missing the other."""
    if math.isnan(first):
        return second
    if math.isnan(second):
        return first
    return max(first, second)
