"""A fixed piece of work, timed next to each evaluation: whether the machine was as fast for one run as for another.

Runs that share a core's cache or its memory with other work are slower, by processor time too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .files import finite_number

FIELD = "speed_check"
"""The field of ``evals.jsonl``: seconds of the fixed work."""

LIMIT = 1.2
"""How many times the median of comparable runs the fixed work of a run may take."""


def fixed_work(now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a fixed piece of work on one core, the median of three: about 5 ms each.

    Args:
        now: the clock that times it, as the training clock is timed.
    """
    numbers = [(k * 7919) % 104_729 / 104_729 for k in range(20_000)]
    seconds = []
    for _ in range(3):
        began = now()
        sorted(numbers)
        seconds.append(now() - began)
    return statistics.median(seconds)


def speed_of(evals: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds of a run's checks; 0 if it has none.

    >>> speed_of([{"speed_check": 0.004}, {"speed_check": 0.006}, {"speed_check": 0.005}])
    0.005
    """
    checks = [finite_number(row[FIELD]) for row in evals if row.get(FIELD) is not None]
    return statistics.median(checks) if checks else 0.0


def disturbed(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return the runs whose check (`speed_of`) took longer than the limit, each with its multiple of the median.

    Runs without a check do not count.

    >>> disturbed({"a": 0.005, "b": 0.005, "c": 0.0073, "d": 0.0})
    {'c': 1.46}
    """
    known = [seconds for seconds in speeds.values() if seconds > 0]
    if not known:
        return {}
    usual = statistics.median_low(known)
    return {run: round(seconds / usual, 2) for run, seconds in speeds.items() if seconds > LIMIT * usual}
