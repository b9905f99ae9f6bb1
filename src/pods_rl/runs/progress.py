"""How far a run is that still trains: its clocks, and the share of its budget that it has used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .files import METRICS, finite_number, last_row
from .run import Run


@dataclass(frozen=True)
class Progress:
    """The latest clocks of a run, and how far they are. A missing number is NaN."""

    step: float
    seconds: float  # training clock
    share: float  # of the budget that ends first
    reward: float  # of the latest step


def progress_of(run: Run, recipe: Mapping[str, Any] | None = None) -> Progress:
    """Return how far a run is, by the newer of its status and its last logged step; damaged values count as missing."""
    budget = run.config if recipe is None else recipe
    last = last_row(run.path / METRICS)
    # whichever is newer: the status and the metrics are not written at the same moment
    step = _larger(_number(run.status.get("step")), _number(last.get("step")))
    seconds = _larger(_number(run.status.get("seconds")), _number(last.get("seconds")))
    share = share_done(step, seconds, budget.get("max_steps"), budget.get("max_seconds"))
    if math.isnan(share):
        share = _number(last.get("epoch")) / _limit(budget.get("num_train_epochs"))
    return Progress(step, seconds, min(share, 1.0), _number(last.get("reward")))


def share_done(step: float, seconds: float, max_steps: object, max_seconds: object) -> float:
    """Return the share that a run has used of the budget that ends first; NaN without a budget."""
    return _larger(step / _limit(max_steps), seconds / _limit(max_seconds))


def _number(value: object) -> float:
    return finite_number(value, math.nan)


def _limit(value: object) -> float:
    """Return a limit; NaN if there is none, which -1 stands for too."""
    limit = _number(value)
    return limit if limit > 0 else math.nan


def _larger(first: float, second: float) -> float:
    """Return the larger of two numbers; if one is missing the other."""
    return second if math.isnan(first) or second > first else first
