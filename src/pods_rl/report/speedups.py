"""Speedups with their bootstrap intervals, and whether the runs settle them.

Axes as in ``statistics``: R runs of one arm, C checkpoints, B bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .statistics import (
    AT_ONCE,
    CRITERIA,
    Z_95,
    Array,
    Criterion,
    evaluation_error,
    mean_curve,
    normal_band,
    threshold,
    time_ratio,
    time_to,
)

FEW = 5
"""The paper's smallest number of runs. Below it a percentile bootstrap of noise excludes 1 too often."""

_T_975 = {1: 12.706, 2: 4.303, 3: 3.182}  # Student's t by degrees of freedom, for 2, 3 and 4 runs
_MOST_DRAWS = 200_000_000  # of one arm: with more than 100,000 runs there are fewer resamples


@dataclass(frozen=True)
class Speedup:
    """The speedup of an arm to the baseline's threshold; times in the unit of the given seconds."""

    criterion: str
    interpolated: bool
    threshold: float
    baseline_time: float
    arm_time: float  # inf: never reached
    speedup: float  # 0: never reached; inf: reached at time 0
    ci_low: float = math.nan  # NaN with fewer than two runs on either side
    ci_high: float = math.nan
    never_reached: float = math.nan  # share of resamples; NaN if there is no interval
    reached_low: float = math.nan  # the interval of the other resamples; NaN if there are none
    reached_high: float = math.nan
    cautious_low: float = math.nan  # allows for few runs and for the evaluation's noise
    cautious_high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.ci_low)

    @property
    def includes_one(self) -> bool:
        """Whether the printed interval includes 1, so that either arm may be faster; true without an interval."""
        return not _excludes_one(self.ci_low, self.ci_high)

    @property
    def settled(self) -> bool:
        """Whether the runs show which arm is faster: both intervals lie on the same side of 1."""
        same_side = (self.ci_low > 1) == (self.cautious_low > 1)
        return same_side and not self.includes_one and _excludes_one(self.cautious_low, self.cautious_high)


def _excludes_one(low: float, high: float) -> bool:
    return not math.isnan(low) and not round(low, 2) <= 1 <= round(high, 2)


@dataclass(frozen=True, eq=False)
class _Arm:
    """The runs of an arm, and the mean curves of B resamples of them."""

    scores: Array  # [R, C]
    seconds: Array  # [R, C]
    drawn_scores: Array  # [B, C]; B is 0 with one run
    drawn_seconds: Array  # [B, C]
    cautious: Array  # [B, C] drawn scores with a minimum of noise


def speedups(
    baseline: tuple[Array, Array, Array], arm: tuple[Array, Array, Array], *, resamples: int, seed: int
) -> Iterator[Speedup]:
    """Yield the speedup of an arm by both criteria, with and without interpolation (``speedup``).

    Args:
        baseline: scores, seconds and standard errors of its evaluations, each ``[R, C]``.
        arm: the same of the arm.
    """
    random = np.random.default_rng(seed)
    base, own = (_resample(*tables, resamples, random, seed) for tables in (baseline, arm))
    for criterion in CRITERIA:
        for interpolated in (False, True):
            yield _compare(base, own, criterion, interpolated)


def _resample(
    scores: Array, seconds: Array, errors: Array, resamples: int, random: np.random.Generator, seed: int
) -> _Arm:
    """Draw runs with replacement. Memory is bounded by the resampled curves themselves."""
    runs = len(scores)
    count = min(resamples, max(200, _MOST_DRAWS // runs)) if runs > 1 else 0
    drawn_scores, drawn_seconds = _resampled_means([scores, seconds], count, random)
    cautious = _cautious(scores, errors, drawn_scores, seed) if count else drawn_scores
    return _Arm(scores, seconds, drawn_scores, drawn_seconds, cautious)


def _resampled_means(tables_RC: Sequence[Array], resamples: int, random: np.random.Generator) -> list[Array]:
    """``mean_curve`` of each table, ``[B, C]``, for the same draws of runs; two matrix products make many at once."""
    runs, checkpoints = tables_RC[0].shape
    means = [np.empty((resamples, checkpoints)) for _ in tables_RC]
    there = [~np.isnan(table) for table in tables_RC]
    at_once = max(1, AT_ONCE // runs)
    for start in range(0, resamples, at_once):
        draws = random.integers(runs, size=(min(at_once, resamples - start), runs))
        draws += runs * np.arange(len(draws))[:, None]
        times_drawn_BR = np.bincount(draws.ravel(), minlength=draws.size).reshape(draws.shape).astype(np.float64)
        for mean, table, known in zip(means, tables_RC, there, strict=True):
            count = times_drawn_BR @ known.astype(np.float64)
            total = times_drawn_BR @ np.where(known, table, 0.0)
            mean[start : start + len(draws)] = np.where(2 * count > runs, total / np.maximum(count, 1), np.nan)
    return means


def _cautious(scores: Array, errors: Array, drawn_BC: Array, seed: int) -> Array:
    """Return resampled means with a minimum of noise.

    Below ``FEW`` runs their deviations are widened as Student's t widens a normal interval. If runs
    differ less than the standard error of an evaluation, normal noise is added.
    """
    runs, mean = len(scores), mean_curve(scores)
    low, high = normal_band(scores)
    widen = math.sqrt(runs / (runs - 1)) * _T_975[runs - 1] / Z_95 if runs < FEW else 1.0
    known = ~np.isnan(mean)
    centre = np.where(known, mean, 0.0)
    means = np.where(known, centre + widen * (drawn_BC - centre), drawn_BC)
    lacking = evaluation_error(scores, errors) ** 2 - ((high - low) / (2 * Z_95)) ** 2
    lacking = np.sqrt(np.where(lacking > 0, lacking, 0.0))
    if lacking.any():
        means += lacking * np.random.default_rng([seed, 1, runs]).standard_normal(means.shape)
    return means


def _compare(base: _Arm, arm: _Arm, criterion: Criterion, interpolated: bool) -> Speedup:
    goal = threshold(mean_curve(base.scores), criterion)
    base_time, arm_time = (
        float(time_to(mean_curve(one.scores), mean_curve(one.seconds), goal, interpolated=interpolated))
        for one in (base, arm)
    )
    found = Speedup(criterion, interpolated, float(goal), base_time, arm_time, float(time_ratio(base_time, arm_time)))
    count = min(len(base.drawn_scores), len(arm.drawn_scores))
    if not count or not np.isfinite(goal):
        return found

    def ratios(base_BC: Array, arm_BC: Array) -> tuple[Array, NDArray[np.bool_]]:
        goal_B = threshold(base_BC[:count], criterion)
        base_B = time_to(base_BC[:count], base.drawn_seconds[:count], goal_B, interpolated=interpolated)
        arm_B = time_to(arm_BC[:count], arm.drawn_seconds[:count], goal_B, interpolated=interpolated)
        return time_ratio(base_B, arm_B), np.isfinite(arm_B)

    ratios_B, reached_B = ratios(base.drawn_scores, arm.drawn_scores)
    low, high = _interval(ratios_B)
    reached = _interval(ratios_B[reached_B])
    found = replace(found, ci_low=low, ci_high=high, never_reached=1 - float(np.mean(reached_B)),
                    reached_low=reached[0], reached_high=reached[1])  # fmt: skip
    if (criterion, interpolated) != ("p99", False):  # only the headline's rule needs the cautious interval
        return found
    low, high = _interval(ratios(base.cautious, arm.cautious)[0])
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
    """Return an arm's speedup to the level of the baseline, with a 95 % bootstrap interval.

    Source: the authors' published analysis. T is 0.99 (``p99``) or 1.0 (``peak``) times the maximum of the baseline's
    mean curve; the speedup is the time of the first checkpoint at which the baseline's mean curve reaches T over that
    of the arm's. ``interpolated`` takes the linear crossing between checkpoints instead.

    Runs of the baseline and of the arm are drawn with replacement, independently, and T, both mean curves and both
    clocks are computed anew in each resample. A resample in which the arm never reaches T counts as speedup 0; their
    share is ``never_reached``, and ``reached_low`` and ``reached_high`` are the interval of the others, which is the
    authors' own. The same ``seed`` draws the same baseline for every arm and criterion.

    Args:
        baseline_scores_RC: ``[R, C]``; baseline and arm may differ in runs and in checkpoints.
        baseline_seconds_RC: ``[R, C]`` real times; the time of a checkpoint is their mean over runs.
        arm_scores_RC: ``[R, C]``.
        arm_seconds_RC: ``[R, C]``.
        resamples: 0 for no interval.
        baseline_errors_RC: ``[R, C]`` standard errors of the evaluations, if they are known.
        arm_errors_RC: ``[R, C]``.

    Returns:
        A ``Speedup``. Checkpoints that half of the runs or fewer have are skipped, so an arm whose runs die is not
        credited with what they might have reached. An arm at T from time 0 has speedup inf (1 if the baseline is
        too). With one run on either side the interval is NaN.

    >>> grpo, pods = np.array([[0.2, 0.5, 0.8]] * 2), np.array([[0.2, 0.8, 0.9]] * 2)
    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> s = speedup(grpo, clock, pods, clock)
    >>> s.speedup, s.ci_low, s.ci_high, s.never_reached
    (2.0, 2.0, 2.0, 0.0)
    """
    given = (
        ("baseline", baseline_scores_RC, baseline_seconds_RC, baseline_errors_RC),
        ("arm", arm_scores_RC, arm_seconds_RC, arm_errors_RC),
    )
    tables = []
    for what, scores_RC, seconds_RC, errors_RC in given:
        scores, seconds = np.asarray(scores_RC, float), np.asarray(seconds_RC, float)
        if scores.ndim != 2 or 0 in scores.shape or scores.shape != seconds.shape:
            raise ValueError(
                f"{what} scores and seconds must both be [runs, checkpoints] with at least one of each, "
                f"got {scores.shape} and {seconds.shape}"
            )
        tables.append((scores, seconds, np.full_like(scores, np.nan) if errors_RC is None else np.asarray(errors_RC)))
    random = np.random.default_rng(seed)
    base, arm = (_resample(*table, resamples, random, seed) for table in tables)
    return _compare(base, arm, criterion, interpolated)
