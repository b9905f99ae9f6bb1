"""Mean curves, bands, differences of scores, and speedups with their bootstrap intervals.

Axes: R runs (seeds) of one arm, C checkpoints, B bootstrap resamples. Scores and seconds are ``[R, C]``, NaN
if a run has no evaluation at that checkpoint (it failed or was killed earlier).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_Curves = Sequence[Sequence[Array]]  # of the baseline and the arm: mean scores and seconds

CRITERIA = {"p99": 0.99, "peak": 1.0}
"""Share of the baseline's peak to reach; 0.99 is the authors' rule."""

Z_95 = 1.96
"""Half width of the paper's band in standard errors."""

FEW = 5
"""The paper's smallest number of runs. Below it a percentile bootstrap of noise excludes 1 too often."""

# 97.5 % quantile of Student's t by degrees of freedom; between these it is nearly linear in 1 / freedom
_T_975 = {np.inf: Z_95, 30: 2.042, 15: 2.131, 10: 2.228, 7: 2.365, 5: 2.571, 4: 2.776, 3: 3.182, 2: 4.303, 1: 12.706}
_ROUNDING = 1e-12  # the means of two and of three runs at 0.8 differ in the last digit


def mean_curve(scores_RC: ArrayLike, drawn_BR: Array | None = None) -> Array:
    """Return the mean over the runs that have each checkpoint, ``[C]``, or ``[B, C]`` over resamples of the runs.

    A checkpoint that half of the runs or fewer have is NaN: a mean over the one run that lived longest says nothing
    about the arm.

    Args:
        scores_RC: ``[R, C]``.
        drawn_BR: how often each resample has each run, R in total. By default each run counts once.

    >>> mean_curve([[0.2, 0.4, 0.9], [0.4, 0.6, np.nan], [0.3, np.nan, np.nan]]).round(3)
    array([0.3, 0.5, nan])
    """
    scores = np.asarray(scores_RC, dtype=np.float64)
    drawn = np.ones(len(scores)) if drawn_BR is None else drawn_BR
    known = ~np.isnan(scores)
    count = drawn @ known.astype(np.float64)
    total = drawn @ np.where(known, scores, 0.0)
    return np.where(2 * count > len(scores), total / np.maximum(count, 1), np.nan)


def normal_band(scores_RC: ArrayLike) -> tuple[Array, Array]:
    """Return the paper's 95 % band, low and high: the mean plus or minus 1.96 standard errors over runs (ddof = 1).

    NaN at a checkpoint that fewer than two runs have.

    >>> low, high = normal_band([[0.2, 0.5], [0.4, np.nan]])
    >>> low.round(3), high.round(3)
    (array([0.104,   nan]), array([0.496,   nan]))
    """
    scores = np.asarray(scores_RC, dtype=np.float64)
    mean = mean_curve(scores)
    count = (~np.isnan(scores)).sum(axis=0)
    spread = np.sqrt(np.nansum((scores - mean) ** 2, axis=0) / np.maximum(count - 1, 1))
    half = np.where(count > 1, Z_95 * spread / np.sqrt(np.maximum(count, 1)), np.nan)
    return mean - half, mean + half


def time_to(mean_C: ArrayLike, time_C: ArrayLike, target: ArrayLike, *, interpolated: bool = False) -> Array:
    """Return the time at which a mean curve first reaches a score, ``[...]``; inf if it never does.

    Args:
        mean_C: ``[..., C]`` scores; NaN checkpoints are skipped.
        time_C: ``[..., C]`` times of the checkpoints, any unit.
        target: ``[...]`` the score to reach; equal counts as reached, however a mean was rounded.
        interpolated: take the crossing of the straight line from the checkpoint before. A curve that starts at or
            above the target has none before: its first checkpoint's time is the answer.

    >>> float(time_to([0.2, 0.6, 0.8], [0, 10, 20], 0.7)), float(time_to([0.2, 0.6], [0, 10], 0.7))
    (20.0, inf)
    >>> float(time_to([0.2, 0.6, 0.8], [0, 10, 20], 0.7, interpolated=True).round(6))
    15.0
    """
    mean, time = np.broadcast_arrays(np.asarray(mean_C, float), np.asarray(time_C, float))
    goal = np.asarray(target, dtype=np.float64)[..., None]
    known = ~(np.isnan(mean) | np.isnan(time))
    reached = known & (np.where(known, mean, -np.inf) >= goal - _ROUNDING * np.abs(goal))
    first = reached.argmax(axis=-1)[..., None]
    found = np.take_along_axis(time, first, axis=-1)
    if interpolated:
        latest = np.maximum.accumulate(np.where(known, np.arange(mean.shape[-1]), 0), axis=-1)
        before = np.take_along_axis(latest, np.maximum(first - 1, 0), axis=-1)
        low, high = (np.take_along_axis(mean, at, axis=-1) for at in (before, first))
        start = np.take_along_axis(time, before, axis=-1)
        rise = np.where(high > low, high - low, 1.0)
        crossing = start + (found - start) * np.clip((goal - low) / rise, 0.0, 1.0)
        found = np.where(np.isnan(crossing), found, crossing)  # NaN: no checkpoint before
    return np.where(reached.any(axis=-1), found[..., 0], np.inf)


def time_ratio(baseline_time: ArrayLike, arm_time: ArrayLike) -> Array:
    """Return baseline time over arm time, defined for every pair of times.

    An arm that never reaches it (inf) has speedup 0. An arm that starts there has speedup inf, or 1 if the baseline
    does too. A baseline without a time gives NaN.

    >>> time_ratio([60, 60, 60, 0], [30, np.inf, 0, 0])
    array([ 2.,  0., inf,  1.])
    """
    baseline, arm = np.asarray(baseline_time, float), np.asarray(arm_time, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(baseline == arm, 1.0, baseline / arm)
    return np.where(np.isfinite(baseline), ratio, np.nan)


@dataclass(frozen=True)
class Difference:
    """The final score of one arm minus that of another."""

    mean: float
    low: float  # of the 95 % interval; NaN with one run on either side
    high: float
    side: int = 0  # 1 if every run of the arm is above every run of the other, -1 if below; 0 with one run

    @property
    def settled(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def difference(arm_R: Array, other_R: Array, arm_error: float = math.nan, other_error: float = math.nan) -> Difference:
    """Return the difference of the mean scores of two arms with Welch's 95 % interval.

    Args:
        arm_R: final score of each run of the arm.
        other_R: the same of the other.
        arm_error: standard error that the evaluations' own noise gives the arm's mean. Where runs differ by less,
            it replaces their standard error. NaN if it is unknown.
        other_error: the same of the other.

    >>> found = difference(np.array([0.8, 0.82, 0.84]), np.array([0.7, 0.72, 0.74]))
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
    (0.1, 0.055, 0.145)
    """
    mean = float(np.mean(arm_R) - np.mean(other_R))
    if min(len(arm_R), len(other_R)) < 2:
        return Difference(mean, math.nan, math.nan)
    squares, parts = 0.0, 0.0
    for scores, error in ((arm_R, arm_error), (other_R, other_error)):
        square = max(float(np.var(scores, ddof=1)) / len(scores), 0.0 if math.isnan(error) else error**2)
        squares += square
        parts += square**2 / (len(scores) - 1)
    freedom = max(squares**2 / parts, 1.0) if parts else math.inf
    half = float(np.interp(1 / freedom, [1 / known for known in _T_975], [*_T_975.values()])) * math.sqrt(squares)
    side = int(arm_R.min() > other_R.max()) - int(arm_R.max() < other_R.min())
    return Difference(mean, mean - half, mean + half, side)


@dataclass(frozen=True)
class Speedup:
    """The speedup of an arm to the baseline's threshold; times in the unit of the given seconds."""

    criterion: str
    interpolated: bool
    threshold: float
    baseline_time: float
    arm_time: float  # inf: never reached
    speedup: float  # 0: never reached; inf: reached at time 0
    runs: int  # of the arm with fewer runs
    ci_low: float = math.nan  # NaN with fewer than two runs on either side
    ci_high: float = math.nan
    never_reached: float = math.nan  # share of resamples; NaN if there is no interval
    reached_low: float = math.nan  # the interval of the other resamples; NaN if there are none
    reached_high: float = math.nan

    @property
    def settled(self) -> bool:
        """Whether the runs show which arm is faster: there are enough of them, and the printed interval excludes 1."""
        return self.runs >= FEW and (round(self.ci_low, 2) > 1 or round(self.ci_high, 2) < 1)


def speedups(
    baseline: tuple[Array, Array], arm: tuple[Array, Array], *, resamples: int = 2000, seed: int = 0
) -> Iterator[Speedup]:
    """Yield the speedup of an arm to the level of the baseline by both criteria, at checkpoints and interpolated.

    Source: the authors' published analysis. T is 0.99 (``p99``) or 1.0 (``peak``) times the maximum of the baseline's
    mean curve; the speedup is the time of the first checkpoint at which the baseline's mean curve reaches T over that
    of the arm's. ``interpolated`` takes the linear crossing between checkpoints instead.

    The interval is a bootstrap over the runs of each. A resample in which the arm never reaches T counts as speedup 0.
    ``reached_low`` and ``reached_high`` are the interval of the others, which is the authors' own.

    Args:
        baseline: scores and seconds, each ``[R, C]``; a checkpoint's time is the mean of its seconds over runs.
        arm: the same of the arm, which may have other runs and checkpoints.
        resamples: 0 for no interval.
        seed: of the draws; the same seed draws the same baseline for every arm.

    Returns:
        A ``Speedup`` each, ``p99`` at checkpoints first. An arm at T from time 0 has speedup inf (1 if the baseline is
        too). With one run on either side the interval is NaN.

    >>> grpo, pods = np.array([[0.2, 0.5, 0.8]] * 2), np.array([[0.2, 0.8, 0.9]] * 2)
    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> s = next(speedups((grpo, clock), (pods, clock)))
    >>> s.speedup, s.ci_low, s.ci_high, s.never_reached
    (2.0, 2.0, 2.0, 0.0)
    """
    random = np.random.default_rng(seed)
    runs = [len(scores) for scores, _ in (baseline, arm)]
    draws = [_draw(count, resamples if min(runs) > 1 else 0, random) for count in runs]
    means = [[mean_curve(table) for table in tables] for tables in (baseline, arm)]
    drawn = [[mean_curve(table, draw) for table in tables] for tables, draw in zip((baseline, arm), draws, strict=True)]
    for criterion in CRITERIA:
        for interpolated in (False, True):
            yield _compare(means, drawn, criterion, interpolated, min(runs))


def _draw(runs: int, resamples: int, random: np.random.Generator) -> Array:
    """Return how often each run is in each resample, ``[B, R]``."""
    draws_BR = random.integers(runs, size=(resamples, runs)) + runs * np.arange(resamples)[:, None]
    return np.bincount(draws_BR.ravel(), minlength=draws_BR.size).reshape(draws_BR.shape).astype(np.float64)


def _compare(means: _Curves, drawn: _Curves, criterion: str, interpolated: bool, runs: int) -> Speedup:
    """Return a speedup from the mean scores and seconds of the baseline and the arm, and from their resamples."""

    def measure(curves: _Curves) -> tuple[Array, Array, Array]:
        goal = np.asarray(CRITERIA[criterion] * np.fmax.reduce(curves[0][0], axis=-1))  # NaN checkpoints are skipped
        base, arm = (time_to(scores, seconds, goal, interpolated=interpolated) for scores, seconds in curves)
        return goal, base, arm

    goal, base_time, arm_time = map(float, measure(means))
    ratio = float(time_ratio(base_time, arm_time))
    bounds: tuple[float, ...] = ()
    if len(drawn[0][0]) and np.isfinite(goal):
        _, base_B, arm_B = measure(drawn)
        ratios_B, reached_B = time_ratio(base_B, arm_B), np.isfinite(arm_B)
        bounds = (*_interval(ratios_B), 1 - float(np.mean(reached_B)), *_interval(ratios_B[reached_B]))
    return Speedup(criterion, interpolated, goal, base_time, arm_time, ratio, runs, *bounds)


def _interval(ratios_B: Array) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentile, at values that occur, so that an infinite speedup stays infinite."""
    known = ratios_B[~np.isnan(ratios_B)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)
