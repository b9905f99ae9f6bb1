"""An arm's evaluations as one table of runs and checkpoints: aligned, interpolated if clocks differ, bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import Array, mean_curve

ACCURACIES = ("answer_accuracy", "accuracy", "format_accuracy", "both_accuracy")
LENGTH = "mean_completion_tokens"
HOUR = 3600.0

MOST_CHECKPOINTS = 1000  # of a curve; a longer one keeps this many, evenly spread
LARGEST = 1e15  # of a logged number: squares and sums of such ones stay finite
_MOST_CELLS = 4_000_000  # runs x checkpoints

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Curve:
    """One arm's evaluations: R runs, C checkpoints aligned by their nominal second."""

    runs: tuple[str, ...]
    due: Array  # [C] nominal seconds
    seconds: Array  # [R, C] real seconds of training clock; NaN if a run has no such checkpoint
    scores: Array  # [R, C]
    errors: Array  # [R, C] standard error of each evaluation; NaN if it is not known
    interpolated: bool = False  # each run was evaluated at its own times

    @cached_property
    def mean(self) -> Array:
        return mean_curve(self.scores)

    @property
    def has_mean(self) -> bool:
        """Whether most runs share a checkpoint; else there is nothing to compare."""
        return not bool(np.isnan(self.mean).all())

    @cached_property
    def times(self) -> Array:
        """Mean of the real seconds over runs."""
        return mean_curve(self.seconds)

    @property
    def tables(self) -> tuple[Array, Array]:
        return self.scores, self.seconds

    @property
    def is_single(self) -> bool:
        return len(self.runs) == 1

    @property
    def has_errors(self) -> bool:
        return not bool(np.isnan(self.errors).all())

    def last(self, horizon: float = math.inf) -> int:
        """The last checkpoint with a mean, no later than ``horizon`` nominal seconds; else the first."""
        usable = np.flatnonzero(~np.isnan(self.mean) & (self.due <= horizon * (1 + 1e-9)))
        return int(usable[-1]) if len(usable) else 0


def curve_of(evals: Mapping[str, Iterable[Mapping[str, Any]]], metric: str) -> Curve | None:
    """Return the curve of one metric over the runs of an arm. If no run has an evaluation, return None.

    Args:
        evals: evaluations by run, each with ``due`` (nominal seconds), ``seconds`` (real), the metric and, where it is
            known, its standard error ``<metric>_se`` or the number of ``prompts``. Of two evaluations of one run with
            the same ``due`` (a resumed run repeats one) the later line counts. ``due`` defaults to ``seconds``.
        metric: the field to read; an evaluation without a finite number there is skipped.

    >>> curve_of({"0": [{"due": 0, "seconds": 0.1, "accuracy": 0.2}], "1": []}, "accuracy").scores
    array([[0.2]])
    """
    points: list[tuple[float, ...]] = []
    for index, rows in enumerate(evals.values()):
        for row in rows:
            score, seconds, due = (finite(row.get(key)) for key in (metric, "seconds", "due"))
            due = seconds if due is None else due
            if score is not None and due is not None:
                error, prompts = finite(row.get(f"{metric}_se")), finite(row.get("prompts"))
                points.append((index, due, due if seconds is None else seconds, score, error or 0.0, prompts or 0.0))
    if not points:
        return None
    run_K, due_K, seconds_K, score_K, error_K, prompts_K = np.array(points, dtype=np.float64).T
    errors_K = standard_errors(score_K, error_K, prompts_K, metric)
    return _align([*evals], run_K.astype(np.int64), due_K, seconds_K, score_K, errors_K)


def standard_errors(scores: Array, given: Array, prompts: Array, metric: str) -> Array:
    """Return the standard error of each evaluation: as given, else that of a share of this many prompts, else NaN.

    Two answers, one right, are added to the prompts (Agresti and Coull 1998): 0 of 256 does not prove 0.

    >>> standard_errors(np.array([0.5, 0.5]), np.array([0.02, 0.0]), np.array([98, 98]), "accuracy").round(3)
    array([0.02, 0.05])
    """
    share = (scores >= 0) & (scores <= 1) & (prompts >= 1) & (metric in ACCURACIES)
    count = np.where(share, prompts, 1.0) + 2
    right = (np.where(share, scores, 0.0) * (count - 2) + 1) / count
    counted = np.where(share, np.sqrt(right * (1 - right) / count), np.nan)
    return np.asarray(np.where(given > 0, given, counted), dtype=np.float64)


def _align(
    names: Sequence[str], run_K: Integers, due_K: Array, seconds_K: Array, scores_K: Array, errors_K: Array
) -> Curve:
    """Return the curve of K evaluations, at most ``MOST_CHECKPOINTS`` long; ``run_K`` are indices of ``names``."""
    values_K = np.stack([seconds_K, scores_K, errors_K])
    present, run_K = np.unique(run_K, return_inverse=True)
    runs = tuple(names[index] for index in present)
    most = max(2, min(MOST_CHECKPOINTS, _MOST_CELLS // len(runs)))
    if len(runs) > 1 and not _share_a_clock(run_K, due_K):
        found = _interpolated(runs, run_K, values_K, most)
        if found is not None:
            return found
    due_C, place_K = np.unique(due_K, return_inverse=True)
    total = len(due_C)
    kept = np.unique(np.linspace(0, total - 1, min(total, most)).round().astype(np.int64))
    place_of = np.full(total, -1)
    place_of[kept] = np.arange(len(kept))
    column_K = place_of[place_K]
    at = column_K >= 0
    table = np.full((3, len(runs), len(kept)), np.nan)
    table[:, run_K[at], column_K[at]] = values_K[:, at]  # the last of equal ones
    seconds, scores, errors = table
    return Curve(runs, due_C[kept], seconds, scores, errors)


def _share_a_clock(run_K: Integers, due_K: Array) -> bool:
    """Whether some run has at least half of its evaluations at times at which another run has one too.

    Evaluations at the earliest time do not count: all runs start at 0.
    """
    points = np.unique(due_K + 1j * run_K)  # each run's times once
    _, place, count = np.unique(points.real, return_inverse=True, return_counts=True)
    run = points.imag[place > 0].astype(np.int64)
    shared = np.bincount(run, weights=count[place[place > 0]] > 1)
    total = np.bincount(run)
    return not len(run) or bool((2 * shared >= total)[total > 0].any())


def _interpolated(runs: tuple[str, ...], run_K: Integers, values_K: Array, most: int) -> Curve | None:
    """Interpolate linearly at common times, about one for each evaluation of a run, without extrapolation.

    The times lie between the start of most runs and the end of most runs. If there are none, return None.
    """
    order = np.lexsort((values_K[0], run_K))
    run_K, (seconds_K, scores_K, errors_K) = run_K[order], values_K[:, order]
    starts = np.flatnonzero(np.r_[True, run_K[1:] != run_K[:-1]])
    ends = np.r_[starts[1:], len(run_K)]
    half = len(runs) // 2
    low = np.sort(seconds_K[starts])[half]
    high = np.sort(seconds_K[ends - 1])[::-1][half]
    within = seconds_K[(seconds_K >= low) & (seconds_K <= high)]
    if not low < high or not len(within):
        return None
    points = max(2, min(int(np.median(ends - starts)), most))
    grid = np.unique(np.r_[low, np.quantile(within, np.linspace(0, 1, points)), high])
    scores, errors = np.full((2, len(runs), len(grid)), np.nan)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for table, values in ((scores, scores_K), (errors, errors_K)):
            table[index] = np.interp(grid, seconds_K[start:end], values[start:end], left=np.nan, right=np.nan)
    return Curve(runs, grid, np.where(np.isnan(scores), np.nan, grid), scores, errors, interpolated=True)


def finite(value: object) -> float | None:
    """Return a number of at most 15 digits, or None: a logged value may be null, text, not finite, or absurd.

    >>> finite("0.5"), finite(None), finite("x"), finite(float("nan")), finite(True)
    (0.5, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < LARGEST else None
