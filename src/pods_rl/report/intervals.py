"""Student's t over runs: the one kind of interval in a report.

Axes: R runs (seeds) of one arm, C checkpoints. Scores are ``[R, C]``, NaN if a run has no evaluation at a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

ALPHA = 0.05
"""Probability with which a difference may be settled although there is none."""

Z_95 = 1.96
"""97.5 % quantile of the normal distribution: of an evaluation over many prompts, and of Student's t of many runs."""

SCORE_DIGITS = 3
"""Decimals of a score, and of a difference of scores, in every output."""

SPEEDUP_DIGITS = 2

FEWEST = 3
"""Runs from which there is an interval: that of two is 13 standard errors wide, and a reader would not believe it."""

_MANY = 1000  # degrees of freedom from which Student's t is the normal distribution to three digits


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t for at least one degree of freedom.

    Welch's test has a fractional number of degrees of freedom. It is rounded down a little, so that few different
    values are computed. This widens an interval by less than 1 %.

    >>> [round(t_quantile(freedom), 3) for freedom in (1, 2, 7, 11, 500, 1e9)]
    [12.706, 4.303, 2.365, 2.201, 1.965, 1.96]
    """
    if freedom >= _MANY:
        return Z_95
    if freedom >= 20:
        parts = 1
    elif freedom >= 2:
        parts = 20
    else:
        parts = 200
    # a computed freedom of 7 may be 6.999...
    rounded_down = math.floor(freedom * parts + 1e-9) / parts
    return _t_quantile(max(1.0, rounded_down))


@cache
def _t_quantile(freedom: float) -> float:
    import mpmath  # loaded here: a report of single runs has no interval

    def excess(quantile: float) -> float:
        return t_outside(quantile, freedom) - ALPHA

    # the quantile falls from 12.706 at one degree of freedom to 1.960
    return float(mpmath.findroot(excess, (1.9, 13.0), solver="anderson", tol=1e-20))


def t_outside(value: float, freedom: float) -> Any:
    """Return the probability of an absolute value larger than this one, by Student's t."""
    if freedom >= _MANY:
        return math.erfc(value / math.sqrt(2))
    import mpmath

    share = freedom / (freedom + value**2)
    return mpmath.betainc(freedom / 2, 0.5, 0, share, regularized=True)


def excludes(low: float, high: float, value: float, digits: int) -> bool:
    """Whether an interval excludes a value, by its ends as they are printed: readers decide by those.

    >>> excludes(0.0004, 0.2, 0.0, 3), excludes(0.0006, 0.2, 0.0, 3), excludes(math.nan, math.nan, 0.0, 3)
    (False, True, False)
    """
    return round(low, digits) > value or round(high, digits) < value


class _Spread(NamedTuple):
    """The parts of the interval of a difference of means, each ``[C]``."""

    error: Array  # standard error over runs; NaN with fewer than three
    freedom: Array  # of Student's t
    floor: Array  # standard error that the evaluations alone give the difference; 0 if it is unknown


def half_widths(
    arm_RC: Array,
    other_RC: Array,
    *,
    paired: bool,
    arm_error_C: ArrayLike = math.nan,
    other_error_C: ArrayLike = math.nan,
) -> Array:
    """Return half the width of the 95 % interval of the arm's mean minus the other's, ``[C]``.

    It is the wider one of two intervals: Student's t over the runs, and 1.96 standard errors of the evaluations, which
    differ by this much even if the runs do not. Where runs differ as seeds do, the first one is wider and contains the
    truth in 95 % of cases. Where they do not, the wider one contains it more often.

    If `paired`, the same row of both is the same seed, and the interval is Student's on the differences of the rows,
    where both have the same seeds. Else it is Welch's. The errors are those that the evaluations' own noise gives the
    means, NaN if unknown. The result is NaN where fewer than three pairs, or runs on either side, have a score.
    """
    spread = _spread(arm_RC, other_RC, paired=paired, arm_error_C=arm_error_C, other_error_C=other_error_C)
    return _half_of(spread)


def _half_of(spread: _Spread) -> Array:
    student_C = np.full_like(spread.error, math.nan)
    for checkpoint in np.flatnonzero(~np.isnan(spread.error)):
        student_C[checkpoint] = t_quantile(float(spread.freedom[checkpoint])) * spread.error[checkpoint]
    half_C: Array = np.maximum(student_C, Z_95 * spread.floor)
    return half_C


def _spread(
    arm_RC: Array, other_RC: Array, *, paired: bool, arm_error_C: ArrayLike, other_error_C: ArrayLike
) -> _Spread:
    arm_square_C, arm_count_C = _squared_error(arm_RC)
    other_square_C, other_count_C = _squared_error(other_RC)
    square_C = arm_square_C + other_square_C
    with np.errstate(divide="ignore", invalid="ignore"):  # of a side without a spread
        parts_C = arm_square_C**2 / (arm_count_C - 1) + other_square_C**2 / (other_count_C - 1)
        freedom_C = np.where(parts_C > 0, square_C**2 / parts_C, np.inf)
    if paired:
        paired_square_C, pairs_C = _squared_error(arm_RC - other_RC)
        # where a seed is missing on one side, the means are not over the same seeds
        same_C = (np.isnan(arm_RC) == np.isnan(other_RC)).all(axis=0)
        square_C = np.where(same_C, paired_square_C, square_C)
        freedom_C = np.where(same_C, pairs_C - 1, freedom_C)
    arm_floor_C = np.nan_to_num(np.asarray(arm_error_C, float))
    other_floor_C = np.nan_to_num(np.asarray(other_error_C, float))
    floor_C = np.broadcast_to(np.hypot(arm_floor_C, other_floor_C), square_C.shape)
    return _Spread(np.sqrt(square_C), freedom_C, floor_C)


def _squared_error(values_RC: Array) -> tuple[Array, Array]:
    """Return the squared standard error of the mean, NaN with fewer than three runs, and their number, each ``[C]``."""
    present_RC = ~np.isnan(values_RC)
    count_C = present_RC.sum(axis=0).astype(np.float64)
    mean_C = np.where(present_RC, values_RC, 0.0).sum(axis=0) / np.maximum(count_C, 1)
    squares_C = (np.where(present_RC, values_RC - mean_C, 0.0) ** 2).sum(axis=0)
    variance_C = squares_C / np.maximum(count_C - 1, 1)
    return np.where(count_C >= FEWEST, variance_C / np.maximum(count_C, 1), np.nan), count_C


def error_of_mean(errors_RC: Array) -> Array:
    """Return the standard error that the evaluations' own noise gives a mean over runs, ``[C]``; NaN if unknown."""
    present_RC = ~np.isnan(errors_RC)
    count_C = present_RC.sum(axis=0)
    total_C = np.sqrt((np.where(present_RC, errors_RC, 0.0) ** 2).sum(axis=0))
    return np.where(count_C > 0, total_C / np.maximum(count_C, 1), np.nan)


def t_band(scores_RC: ArrayLike, errors_RC: ArrayLike | None = None) -> tuple[Array, Array]:
    """Return Student's 95 % interval of the mean over runs at each checkpoint: low and high, each ``[C]``.

    NaN at a checkpoint that fewer than three runs have. Where the runs differ by less than the evaluations' own noise,
    whose standard errors may be given, that noise gives the interval.

    >>> low, high = t_band([[0.2, 0.5], [0.4, np.nan], [0.3, np.nan]])
    >>> low.round(3), high.round(3)
    (array([0.052,   nan]), array([0.548,   nan]))
    """
    scores = np.asarray(scores_RC, dtype=np.float64)
    errors = np.full_like(scores, math.nan) if errors_RC is None else np.asarray(errors_RC, dtype=np.float64)
    present = ~np.isnan(scores)
    mean = np.where(present, scores, 0.0).sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    # paired with zeros, the differences are the scores
    error = error_of_mean(np.where(present, errors, math.nan))
    half = half_widths(scores, np.zeros_like(scores), paired=True, arm_error_C=error)
    return mean - half, mean + half


@dataclass(frozen=True)
class Difference:
    """The score of one arm minus that of another at one time."""

    mean: float
    low: float  # of the 95 % interval; NaN with fewer than three runs on either side
    high: float
    paired: bool = False  # by seed
    p: float = math.nan  # two-sided p-value of no difference; `corrected` ones are for all that are looked at

    def __neg__(self) -> Difference:
        """The difference from the other arm's side."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)

    @property
    def settled(self) -> bool:
        """Whether the printed interval excludes 0, also by the p-value, which `corrected` has changed."""
        return excludes(self.low, self.high, 0.0, SCORE_DIGITS) and self.p < ALPHA


UNKNOWN = Difference(math.nan, math.nan, math.nan)


def difference(
    arm_R: Array, other_R: Array, arm_error: float = math.nan, other_error: float = math.nan, *, paired: bool = False
) -> Difference:
    """Return the difference of the mean scores of two arms with its 95 % interval; arguments as of `half_widths`.

    >>> gap = difference(np.array([0.8, 0.82, 0.84]), np.array([0.7, 0.72, 0.74]))
    >>> round(gap.mean, 3), round(gap.low, 3), round(gap.high, 3)
    (0.1, 0.055, 0.145)
    >>> gap = difference(np.array([0.8, 0.82, 0.84]), np.array([0.7, 0.71, 0.75]), paired=True)
    >>> round(gap.mean, 3), round(gap.low, 3), round(gap.high, 3), round(gap.p, 3)
    (0.1, 0.075, 0.125, 0.003)
    """
    mean = float(np.mean(arm_R) - np.mean(other_R))
    if min(len(arm_R), len(other_R)) < FEWEST:
        return Difference(mean, math.nan, math.nan)
    spread = _spread(
        arm_R[:, None], other_R[:, None], paired=paired, arm_error_C=[arm_error], other_error_C=[other_error]
    )
    (half,) = _half_of(spread).tolist()
    # The p-value is the larger one of the two tests whose intervals `half_widths` takes the wider one of.
    error = float(spread.error[0])
    floor = float(spread.floor[0])
    # Without a spread, p is 0 for any difference, and 1 for none.
    over_runs = float(t_outside(abs(mean) / error, float(spread.freedom[0]))) if error > 0 else float(mean == 0)
    of_evaluations = float(t_outside(abs(mean) / floor, math.inf)) if floor > 0 else 0.0
    return Difference(mean, mean - half, mean + half, paired, max(over_runs, of_evaluations))


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Return differences that are looked at together, with p-values by Holm's method (1979).

    If none of them exists, the probability that one or more is settled is at most 5 %. Their intervals stay as they
    are: each is of one difference. Differences without a p-value do not count.

    >>> [round(gap.p, 3) for gap in corrected([Difference(0.1, 0, 0, p=p) for p in (0.03, 0.01, 0.04)])]
    [0.06, 0.03, 0.06]
    """
    tested = [index for index, gap in enumerate(differences) if not math.isnan(gap.p)]
    tested.sort(key=lambda index: differences[index].p)
    found = [*differences]
    largest = 0.0
    for rank, index in enumerate(tested):
        largest = max(largest, differences[index].p * (len(tested) - rank))
        found[index] = replace(differences[index], p=min(largest, 1.0))
    return found
