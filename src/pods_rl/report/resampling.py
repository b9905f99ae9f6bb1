"""Speedups with their bootstrap intervals, and whether the runs settle them: pure numpy on arrays.

Axes: R runs (seeds) of one arm, C checkpoints, B bootstrap resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .statistics import Array, Criterion, mean_curve, normal_band, threshold, time_ratio, time_to

FEW = 5
"""The paper's smallest number of runs. Below it a percentile bootstrap of noise excludes 1 too often."""

_T_975 = {1: 12.706, 2: 4.303, 3: 3.182}  # Student's t by degrees of freedom, for 2, 3 and 4 runs
_CHUNK = 2_000_000  # numbers drawn at once
_MOST_DRAWS = 200_000_000  # of one arm: with more than 100,000 runs there are fewer resamples


@dataclass(frozen=True)
class Speedup:
    """How much sooner an arm reaches the baseline's threshold; times in the unit of the seconds given."""

    criterion: str
    interpolated: bool
    threshold: float
    baseline_time: float
    arm_time: float  # inf: never reached
    speedup: float  # 0: never reached; inf: reached at time 0
    ci_low: float  # NaN with fewer than two runs on either side
    ci_high: float
    never_reached: float  # share of resamples; NaN where there is no interval
    reached_low: float = math.nan  # the interval of the other resamples; NaN where there are none
    reached_high: float = math.nan
    cautious_low: float = math.nan  # allows for few runs and for the evaluation's noise
    cautious_high: float = math.nan

    @property
    def includes_one(self) -> bool:
        """Whether the interval, as it is printed, leaves open which arm is sooner; true without an interval."""
        return not _excludes_one(self.ci_low, self.ci_high)

    @property
    def settled(self) -> bool:
        """Whether the runs show which arm is sooner: both intervals lie on the same side of 1."""
        same_side = (self.ci_low > 1) == (self.cautious_low > 1)
        return same_side and not self.includes_one and _excludes_one(self.cautious_low, self.cautious_high)


def _excludes_one(low: float, high: float) -> bool:
    return not (math.isnan(low) or math.isnan(high)) and not round(low, 2) <= 1 <= round(high, 2)


@dataclass(frozen=True, eq=False)
class Resampled:
    """The mean curve of an arm, and those of B resamples of its runs; no resamples with one run."""

    scores: Array  # [R, C]
    seconds: Array  # [R, C]
    errors: Array  # [R, C] standard error of each evaluation; NaN where it is not known
    drawn_scores: Array  # [B, C]; B is 0 with one run
    drawn_seconds: Array  # [B, C]
    seed: int

    @cached_property
    def mean(self) -> Array:
        return mean_curve(self.scores)

    @cached_property
    def clock(self) -> Array:
        return mean_curve(self.seconds)

    @cached_property
    def cautious(self) -> Array:
        """The resampled means with no less noise than there must be.

        Below ``FEW`` runs their deviations are widened as Student's t widens a normal interval. Where runs happen to
        differ less than the standard error of an evaluation says, normal noise fills the gap.
        """
        runs = len(self.scores)
        if runs < 2:
            return self.drawn_scores
        widen = math.sqrt(runs / (runs - 1)) * _T_975[runs - 1] / 1.96 if runs < FEW else 1.0
        known = ~np.isnan(self.mean)
        centre = np.where(known, self.mean, 0.0)
        means = np.where(known, centre + widen * (self.drawn_scores - centre), self.drawn_scores)
        lacking = evaluation_error(self.scores, self.errors) ** 2 - spread_of_mean(self.scores) ** 2
        lacking = np.sqrt(np.where(lacking > 0, lacking, 0.0))
        if lacking.any():
            means += lacking * np.random.default_rng([self.seed, 1, runs]).standard_normal(means.shape)
        return means


def evaluation_error(scores_RC: Array, errors_RC: Array) -> Array:
    """Standard error that the evaluations' own noise gives the mean over runs, ``[C]``; NaN where it is not known.

    >>> evaluation_error(np.array([[0.5], [0.5]]), np.array([[0.04], [0.04]])).round(4)
    array([0.0283])
    """
    there = ~np.isnan(scores_RC)
    total = np.where(there, errors_RC**2, 0.0).sum(axis=0)
    return np.asarray(np.sqrt(total) / np.maximum(there.sum(axis=0), 1), dtype=np.float64)


def spread_of_mean(scores_RC: Array) -> Array:
    """Standard error of the mean over runs, from how they differ, ``[C]``; NaN with fewer than two runs."""
    low, high = normal_band(scores_RC)
    return (high - low) / (2 * 1.96)


def resampled(
    scores_RC: ArrayLike,
    seconds_RC: ArrayLike,
    errors_RC: ArrayLike | None = None,
    *,
    resamples: int,
    random: np.random.Generator,
    seed: int = 0,
) -> Resampled:
    """Draw runs with replacement, ``resamples`` times. Memory is bounded by the resampled curves themselves."""
    scores, seconds = np.asarray(scores_RC, float), np.asarray(seconds_RC, float)
    errors = np.full(scores.shape, np.nan) if errors_RC is None else np.asarray(errors_RC, float)
    runs, checkpoints = scores.shape
    count = min(resamples, max(200, _MOST_DRAWS // runs)) if runs > 1 else 0
    scores_BC, seconds_BC = np.empty((count, checkpoints)), np.empty((count, checkpoints))
    at_once = max(1, _CHUNK // runs)
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        draws = random.integers(runs, size=(part.stop - part.start, runs))
        draws += runs * np.arange(len(draws))[:, None]
        times_drawn = np.bincount(draws.ravel(), minlength=draws.size).reshape(draws.shape).astype(np.float64)
        scores_BC[part], seconds_BC[part] = _means(times_drawn, scores), _means(times_drawn, seconds)
    return Resampled(scores, seconds, errors, scores_BC, seconds_BC, seed)


def _means(times_drawn_BR: Array, values_RC: Array) -> Array:
    """``mean_curve`` of resamples, from how often each of them holds each run."""
    there = ~np.isnan(values_RC)
    count = times_drawn_BR @ there.astype(np.float64)
    total = times_drawn_BR @ np.where(there, values_RC, 0.0)
    return np.where(2 * count > len(values_RC), total / np.maximum(count, 1), np.nan)


def compare(base: Resampled, arm: Resampled, criterion: Criterion = "p99", *, interpolated: bool = False) -> Speedup:
    """How much sooner an arm reaches the level of the baseline, with a 95 % bootstrap interval (``speedup``)."""
    goal = threshold(base.mean, criterion)
    base_time = time_to(base.mean, base.clock, goal, interpolated=interpolated)
    arm_time = time_to(arm.mean, arm.clock, goal, interpolated=interpolated)
    found = Speedup(
        criterion=criterion,
        interpolated=interpolated,
        threshold=float(goal),
        baseline_time=float(base_time),
        arm_time=float(arm_time),
        speedup=float(time_ratio(base_time, arm_time)),
        ci_low=math.nan,
        ci_high=math.nan,
        never_reached=math.nan,
    )
    count = min(len(base.drawn_scores), len(arm.drawn_scores))
    if not count or not np.isfinite(goal):
        return found

    def times(base_BC: Array, arm_BC: Array) -> tuple[Array, NDArray[np.bool_]]:
        goal_B = threshold(base_BC[:count], criterion)
        base_B = time_to(base_BC[:count], base.drawn_seconds[:count], goal_B, interpolated=interpolated)
        arm_B = time_to(arm_BC[:count], arm.drawn_seconds[:count], goal_B, interpolated=interpolated)
        return time_ratio(base_B, arm_B), np.isfinite(arm_B)

    ratios_B, reached_B = times(base.drawn_scores, arm.drawn_scores)
    low, high = _interval(ratios_B)
    reached_low, reached_high = _interval(ratios_B[reached_B])
    found = replace(
        found,
        ci_low=low,
        ci_high=high,
        never_reached=1 - float(np.mean(reached_B)),
        reached_low=reached_low,
        reached_high=reached_high,
    )
    if (criterion, interpolated) != ("p99", False):  # the rule of the headline alone needs the cautious interval
        return found
    low, high = _interval(times(base.cautious, arm.cautious)[0])
    return replace(found, cautious_low=low, cautious_high=high)


def _interval(ratios_B: Array) -> tuple[float, float]:
    """The 2.5 and 97.5 percentile, at values that occur, so that an infinite speedup stays infinite."""
    known = ratios_B[~np.isnan(ratios_B)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def speedup(
    baseline_scores_RC: ArrayLike,
    baseline_seconds_RC: ArrayLike,
    arm_scores_RC: ArrayLike,
    arm_seconds_RC: ArrayLike,
    *,
    criterion: Criterion = "p99",
    interpolated: bool = False,
    resamples: int = 2000,
    seed: int = 0,
    baseline_errors_RC: ArrayLike | None = None,
    arm_errors_RC: ArrayLike | None = None,
) -> Speedup:
    """How much sooner an arm reaches the level of the baseline, with a 95 % bootstrap interval.

    Source: the rule of the authors' published analysis. T is 0.99 (``p99``) or 1.0 (``peak``) times the
    maximum of the baseline's mean curve; the speedup is the time of the first checkpoint at which the
    baseline's mean curve reaches T over that of the arm's. ``interpolated`` takes the linear crossing
    between checkpoints instead.

    Interval: runs of the baseline and runs of the arm are drawn with replacement, independently of each
    other, and T, both mean curves and both clocks are computed anew in each resample. A resample in which
    the arm never reaches T counts as speedup 0, and their share is ``never_reached``; ``reached_low`` and
    ``reached_high`` are the interval of the others, which is the authors' own. The interval is the
    2.5 and 97.5 percentile, taken at values that occur (no interpolation between resamples, so that an
    infinite speedup stays infinite). The same ``seed`` draws the same baseline for every arm and criterion,
    so that results do not depend on the other arms.

    Args:
        baseline_scores_RC: ``[R, C]``; baseline and arm may differ in runs and in checkpoints.
        baseline_seconds_RC: ``[R, C]`` real times; the time of a checkpoint is their mean over runs.
        arm_scores_RC: ``[R, C]``.
        arm_seconds_RC: ``[R, C]``.
        resamples: 0 for no interval.
        baseline_errors_RC: ``[R, C]`` standard errors of the evaluations, where they are known.
        arm_errors_RC: ``[R, C]``.

    Returns:
        A ``Speedup``. Checkpoints that half of the runs or fewer have are skipped (``mean_curve``),
        so a resample made mostly of runs that died early ends with them: an arm whose runs die is not
        credited with what they might have reached. An arm that reaches T at time 0 has speedup inf (1 if
        the baseline does too: ``time_ratio``). With one run on either side there is no interval: it is NaN.

    >>> grpo, pods = np.array([[0.2, 0.5, 0.8]] * 2), np.array([[0.2, 0.8, 0.9]] * 2)
    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> s = speedup(grpo, clock, pods, clock)
    >>> s.speedup, s.ci_low, s.ci_high, s.never_reached
    (2.0, 2.0, 2.0, 0.0)
    """
    _check(baseline_scores_RC, baseline_seconds_RC, "baseline")
    _check(arm_scores_RC, arm_seconds_RC, "arm")
    random = np.random.default_rng(seed)
    base = resampled(
        baseline_scores_RC, baseline_seconds_RC, baseline_errors_RC, resamples=resamples, random=random, seed=seed
    )
    arm = resampled(arm_scores_RC, arm_seconds_RC, arm_errors_RC, resamples=resamples, random=random, seed=seed)
    return compare(base, arm, criterion, interpolated=interpolated)


def _check(scores_RC: ArrayLike, seconds_RC: ArrayLike, what: str) -> None:
    scores, seconds = np.shape(scores_RC), np.shape(seconds_RC)
    if len(scores) != 2 or 0 in scores or scores != seconds:
        raise ValueError(
            f"{what} scores and seconds must both be [runs, checkpoints] with at least one of each, "
            f"got {scores} and {seconds}"
        )
