"""Speedups with their bootstrap intervals. Axes as in ``statistics``: R runs, C checkpoints, B bootstrap resamples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .statistics import AT_ONCE, CRITERIA, Array, Criterion, mean_curve, threshold, time_ratio, time_to

FEW = 5
"""The paper's smallest number of runs. Below it a percentile bootstrap of noise excludes 1 too often."""

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
    runs: int  # of the arm with fewer runs
    ci_low: float = math.nan  # NaN with fewer than two runs on either side
    ci_high: float = math.nan
    never_reached: float = math.nan  # share of resamples; NaN if there is no interval
    reached_low: float = math.nan  # the interval of the other resamples; NaN if there are none
    reached_high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.ci_low)

    @property
    def settled(self) -> bool:
        """Whether the runs show which arm is faster: there are enough of them, and the printed interval excludes 1."""
        return self.runs >= FEW and self.has_interval and not round(self.ci_low, 2) <= 1 <= round(self.ci_high, 2)


@dataclass(frozen=True, eq=False)
class _Arm:
    """The runs of an arm, and the mean curves of B resamples of them."""

    scores: Array  # [R, C]
    seconds: Array  # [R, C]
    drawn_scores: Array  # [B, C]; B is 0 with one run
    drawn_seconds: Array  # [B, C]


def speedups(
    baseline: tuple[Array, Array], arm: tuple[Array, Array], *, resamples: int = 2000, seed: int = 0
) -> Iterator[Speedup]:
    """Yield the speedup of an arm to the level of the baseline by both criteria, at checkpoints and interpolated.

    Source: the authors' published analysis. T is 0.99 (``p99``) or 1.0 (``peak``) times the maximum of the baseline's
    mean curve; the speedup is the time of the first checkpoint at which the baseline's mean curve reaches T over that
    of the arm's. ``interpolated`` takes the linear crossing between checkpoints instead.

    Runs of the baseline and of the arm are drawn with replacement, independently, and T, both mean curves and both
    clocks are computed anew in each resample. A resample in which the arm never reaches T counts as speedup 0; their
    share is ``never_reached``, and ``reached_low`` and ``reached_high`` are the interval of the others, which is the
    authors' own. The same ``seed`` draws the same baseline for every arm.

    Args:
        baseline: scores and seconds, each ``[R, C]``; a checkpoint's time is the mean of its seconds over runs.
        arm: the same of the arm, which may have other runs and checkpoints.
        resamples: 0 for no interval.
        seed: of the draws.

    Returns:
        A ``Speedup`` each, ``p99`` at checkpoints first. Checkpoints that half of the runs or fewer have are skipped,
        so an arm whose runs die is not credited with what they might have reached. An arm at T from time 0 has speedup
        inf (1 if the baseline is too). With one run on either side the interval is NaN.

    >>> grpo, pods = np.array([[0.2, 0.5, 0.8]] * 2), np.array([[0.2, 0.8, 0.9]] * 2)
    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> s = next(speedups((grpo, clock), (pods, clock)))
    >>> s.speedup, s.ci_low, s.ci_high, s.never_reached
    (2.0, 2.0, 2.0, 0.0)
    """
    for what, (scores, seconds) in (("baseline", baseline), ("arm", arm)):
        if scores.ndim != 2 or 0 in scores.shape or scores.shape != seconds.shape:
            raise ValueError(
                f"{what} scores and seconds must both be [runs, checkpoints] with at least one of each, "
                f"got {scores.shape} and {seconds.shape}"
            )
    random = np.random.default_rng(seed)
    base, own = (_resample(*tables, resamples, random) for tables in (baseline, arm))
    for criterion in CRITERIA:
        for interpolated in (False, True):
            yield _compare(base, own, criterion, interpolated)


def _resample(scores: Array, seconds: Array, resamples: int, random: np.random.Generator) -> _Arm:
    """Draw runs with replacement. Memory is bounded by the resampled curves themselves."""
    runs = len(scores)
    count = min(resamples, max(200, _MOST_DRAWS // runs)) if runs > 1 else 0
    return _Arm(scores, seconds, *_resampled_means([scores, seconds], count, random))


def _resampled_means(tables_RC: Sequence[Array], resamples: int, random: np.random.Generator) -> list[Array]:
    """Return ``mean_curve`` of each table, ``[B, C]``, for the same draws of runs, many with two matrix products."""
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


def _compare(base: _Arm, arm: _Arm, criterion: Criterion, interpolated: bool) -> Speedup:
    goal = threshold(mean_curve(base.scores), criterion)
    base_time, arm_time = (
        float(time_to(mean_curve(one.scores), mean_curve(one.seconds), goal, interpolated=interpolated))
        for one in (base, arm)
    )
    ratio, runs = float(time_ratio(base_time, arm_time)), min(len(base.scores), len(arm.scores))
    found = Speedup(criterion, interpolated, float(goal), base_time, arm_time, ratio, runs)
    count = min(len(base.drawn_scores), len(arm.drawn_scores))
    if not count or not np.isfinite(goal):
        return found
    goal_B = threshold(base.drawn_scores[:count], criterion)
    base_B, arm_B = (
        time_to(one.drawn_scores[:count], one.drawn_seconds[:count], goal_B, interpolated=interpolated)
        for one in (base, arm)
    )
    ratios_B, reached_B = time_ratio(base_B, arm_B), np.isfinite(arm_B)
    low, high = _interval(ratios_B)
    reached_low, reached_high = _interval(ratios_B[reached_B])
    return replace(found, ci_low=low, ci_high=high, never_reached=1 - float(np.mean(reached_B)),
                   reached_low=reached_low, reached_high=reached_high)  # fmt: skip


def _interval(ratios_B: Array) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentile, at values that occur, so that an infinite speedup stays infinite."""
    known = ratios_B[~np.isnan(ratios_B)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)
