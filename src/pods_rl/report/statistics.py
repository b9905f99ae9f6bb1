"""Mean curves, the times at which they reach a score, and speedups.

Axes: R runs (seeds) of one arm, C checkpoints, B draws of the runs. Scores and seconds are ``[R, C]``, NaN
if a run has no evaluation at that checkpoint (it failed or was killed earlier).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .intervals import SPEEDUP_DIGITS, Array, error_of_mean, excludes, half_widths

CRITERIA = {"p99": 0.99, "peak": 1.0}
"""Share of the baseline's peak to reach; 0.99 is the authors' rule."""

FLAT = "flat"
"""The baseline has the level at its first evaluation, so no time to it exists."""

NEVER = "never"
"""Neither arm reaches the score."""

SHORT = "short"
"""The arm ends below the level, and earlier than the baseline reaches it, so the ratio is unknown."""

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
    drawn = np.ones(len(scores)) if drawn_BR is None else drawn_BR  # [R] or [B, R]
    present = ~np.isnan(scores)
    count = drawn @ present.astype(np.float64)  # [C] or [B, C]
    total = drawn @ np.where(present, scores, 0.0)
    return np.where(2 * count > len(scores), total / np.maximum(count, 1), np.nan)


def score_over_time(scores_RC: ArrayLike) -> Array:
    """Return the mean score of each run after its first checkpoint, ``[R]``: how early and how high it learns.

    A checkpoint that a run does not have is skipped.

    >>> score_over_time([[0.1, 0.4, 0.6], [0.1, 0.2, np.nan]])
    array([0.5, 0.2])
    """
    return np.nanmean(np.asarray(scores_RC, dtype=np.float64)[:, 1:], axis=1)


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
    present = ~(np.isnan(mean) | np.isnan(time))  # [..., C]
    reached = present & (np.where(present, mean, -np.inf) >= goal - _ROUNDING * np.abs(goal))
    first = reached.argmax(axis=-1)[..., None]  # [..., 1]
    reached_at = np.take_along_axis(time, first, axis=-1)  # [..., 1]
    if interpolated:
        # the latest checkpoint present up to each one, and so the one before the first that reaches the score
        latest = np.maximum.accumulate(np.where(present, np.arange(mean.shape[-1]), 0), axis=-1)  # [..., C]
        before = np.take_along_axis(latest, np.maximum(first - 1, 0), axis=-1)  # [..., 1]
        low = np.take_along_axis(mean, before, axis=-1)
        high = np.take_along_axis(mean, first, axis=-1)
        start = np.take_along_axis(time, before, axis=-1)
        rise = np.where(high > low, high - low, 1.0)
        crossing = start + (reached_at - start) * np.clip((goal - low) / rise, 0.0, 1.0)
        reached_at = np.where(np.isnan(crossing), reached_at, crossing)  # NaN: no checkpoint before
    return np.where(reached.any(axis=-1), reached_at[..., 0], np.inf)


def time_ratio(baseline_time: ArrayLike, arm_time: ArrayLike) -> Array:
    """Return baseline time over arm time, defined for every pair of times.

    An arm that never reaches it (inf) has speedup 0. An arm that starts there has speedup inf, or 1 if the baseline
    does too. A baseline without a time gives NaN.

    >>> time_ratio([60, 60, 60, 0], [30, np.inf, 0, 0])
    array([ 2.,  0., inf,  1.])
    """
    baseline = np.asarray(baseline_time, dtype=np.float64)
    arm = np.asarray(arm_time, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(baseline == arm, 1.0, baseline / arm)
    return np.where(np.isfinite(baseline), ratio, np.nan)


class Evaluations(NamedTuple):
    """The evaluations of the runs of one arm, each ``[R, C]``."""

    scores: Array
    seconds: Array
    errors: Array | None = None  # standard error of each evaluation
    due: Array | None = None  # [C] nominal seconds; by default the mean of the seconds


Tables = tuple[Array, Array] | Evaluations


@dataclass(frozen=True)
class Speedup:
    """The speedup of an arm to the baseline's threshold; times in the unit of the given seconds."""

    criterion: str
    interpolated: bool
    threshold: float
    baseline_time: float
    arm_time: float  # inf: not reached
    speedup: float  # 0: never reached; inf: reached at time 0; NaN: see `problem`
    ci_low: float = math.nan  # NaN with fewer than two runs on either side
    ci_high: float = math.nan
    problem: str = ""  # FLAT or SHORT: why there is no speedup
    arm_end: float = math.nan  # the arm's last evaluation

    @property
    def settled(self) -> bool:
        """Whether the printed interval excludes 1."""
        return excludes(self.ci_low, self.ci_high, 1.0, SPEEDUP_DIGITS)

    @property
    def never_reached(self) -> bool:
        """Whether the arm's mean does not reach the level, although it trained as long as the baseline needs."""
        return math.isinf(self.arm_time) and not self.problem


def speedups(baseline: Tables, arm: Tables, *, paired: bool = False, intervals: bool = True) -> Iterator[Speedup]:
    """Yield the speedup of an arm to the level of the baseline by both criteria, at checkpoints and interpolated.

    Source: the authors' published analysis. T is 0.99 (``p99``) or 1.0 (``peak``) times the maximum of the baseline's
    mean curve; the speedup is the time of the first checkpoint at which the baseline's mean curve reaches T over that
    of the arm's. ``interpolated`` takes the linear crossing between checkpoints instead.

    The interval is that of the arm's time to T, by Student's t on scores: at each checkpoint of the arm the 95 %
    interval of the difference between the arm's score there and the baseline's score where it reaches T. The arm may
    be at T from the first checkpoint at which the interval's upper end is, and is at T from the first one at which the
    lower end is. If the lower end never is, the arm may never reach T, and the interval begins at 0.

    (Log ratios of the times of single seeds have no usable interval at this level: 99 % of the peak of a mean is a
    score that some seeds never have, so most intervals would be unbounded.)

    Args:
        baseline: scores and seconds, each ``[R, C]``; a checkpoint's time is the mean of its seconds over runs.
            Standard errors of the scores and nominal seconds may follow (`Evaluations`).
        arm: the same of the arm, which may have other runs and checkpoints.
        paired: whether the same row of both is the same seed.
        intervals: whether to compute intervals. An arm against itself has none.

    Returns:
        A ``Speedup`` each, ``p99`` at checkpoints first. An arm at T from time 0 has speedup inf. With one run on
        either side the interval is NaN. There is no speedup (NaN) if the baseline has T at its first evaluation, or if
        the arm ends below T before the baseline reaches it.

    >>> grpo = np.array([[0.2, 0.5, 0.8]] * 2)
    >>> pods = np.array([[0.2, 0.8, 0.9]] * 2)
    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> pods_speedup = next(speedups((grpo, clock), (pods, clock)))
    >>> pods_speedup.speedup, pods_speedup.ci_low, pods_speedup.ci_high, pods_speedup.never_reached
    (2.0, 2.0, 2.0, False)
    """
    baseline = Evaluations(*baseline)
    arm = Evaluations(*arm)
    for criterion in CRITERIA:
        for interpolated in (False, True):
            yield _compare(baseline, arm, criterion, interpolated=interpolated, paired=paired, intervals=intervals)


def speedups_to(baseline: Tables, arm: Tables, targets: Sequence[float], *, paired: bool = False) -> Iterator[Speedup]:
    """Yield the speedup of an arm to each of several scores, at the crossings of the mean curves.

    The interval is as in `speedups`: Student's t on the differences between the arm's scores at each checkpoint and
    the baseline's scores where it reaches the target. If the baseline never reaches it, the two change places: the
    interval is that of the baseline's time to the arm's scores where the arm reaches it.

    Args:
        baseline: as in `speedups`.
        arm: as in `speedups`.
        targets: scores that were chosen before the runs.
        paired: whether the same row of both is the same seed.

    Returns:
        A ``Speedup`` each. It is 0 if only the baseline reaches the target, and infinite if only the arm does. There is
        none (NaN) if neither does, or if an arm has the target at its first evaluation.

    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> grpo = np.array([[0.2, 0.4, 0.6], [0.2, 0.4, 0.6]])
    >>> pods = np.array([[0.2, 0.6, 0.8], [0.2, 0.6, 0.8]])
    >>> [round(result.speedup, 2) for result in speedups_to((grpo, clock), (pods, clock), [0.4, 0.6, 0.7, 0.9])]
    [2.0, 2.0, inf, nan]
    """
    baseline = Evaluations(*baseline)
    arm = Evaluations(*arm)
    for target in targets:
        result = _compare_at(baseline, arm, f"{target:g}", target, interpolated=True, paired=paired, intervals=True)
        if result.problem != FLAT and math.isinf(result.baseline_time):
            result = _reversed(_compare_at(arm, baseline, f"{target:g}", target, interpolated=True, paired=paired))
        yield result


def _reversed(result: Speedup) -> Speedup:
    """Return the speedup of an arm to a score that the baseline never reaches, from that of the two in each other's
    place."""
    if math.isinf(result.baseline_time):
        return replace(result, problem=NEVER)
    return replace(
        result,
        baseline_time=math.inf,
        arm_time=result.baseline_time,
        speedup=math.inf,
        ci_low=_inverse(result.ci_high),
        ci_high=_inverse(result.ci_low),
        problem="",
        arm_end=math.nan,
    )


def _inverse(ratio: float) -> float:
    if ratio == 0:
        return math.inf
    return 1 / ratio


def _compare(
    base: Evaluations, arm: Evaluations, criterion: str, *, interpolated: bool, paired: bool, intervals: bool
) -> Speedup:
    """Return the speedup to a share of the baseline's peak."""
    peak = float(np.fmax.reduce(mean_curve(base.scores)))  # NaN checkpoints are skipped
    goal = CRITERIA[criterion] * peak
    return _compare_at(base, arm, criterion, goal, interpolated=interpolated, paired=paired, intervals=intervals)


def _compare_at(
    base: Evaluations,
    arm: Evaluations,
    criterion: str,
    goal: float,
    *,
    interpolated: bool,
    paired: bool,
    intervals: bool = True,
) -> Speedup:
    """Return the speedup to a score."""
    base_mean = mean_curve(base.scores)
    base_seconds = mean_curve(base.seconds)
    arm_mean = mean_curve(arm.scores)
    arm_seconds = mean_curve(arm.seconds)
    base_time = float(time_to(base_mean, base_seconds, goal, interpolated=interpolated))
    arm_time = float(time_to(arm_mean, arm_seconds, goal, interpolated=interpolated))
    arm_end = float(np.fmax.reduce(np.where(np.isnan(arm_mean), np.nan, arm_seconds)))
    result = Speedup(criterion, interpolated, goal, base_time, arm_time, math.nan, arm_end=arm_end)
    if math.isnan(goal) or np.isnan(arm_mean).all() or math.isinf(base_time):
        return result
    at = _first_at(base_mean, goal)
    start = int(np.flatnonzero(~np.isnan(base_mean))[0])
    if at == start:
        return replace(result, problem=FLAT)
    # by nominal seconds, since the last step of each run ends at another real second
    base_due = float(_due_of(base, base_seconds)[at])
    ends_before = _end_of(arm, arm_mean, arm_seconds) < base_due * (1 - 1e-9)
    if math.isinf(arm_time) and ends_before:
        return replace(result, problem=SHORT)
    result = replace(result, speedup=float(time_ratio(base_time, arm_time)))
    if not intervals or min(len(base.scores), len(arm.scores)) < 2:
        return result
    level_R = base.scores[:, at]
    if interpolated:
        level_R = _scores_at(base.scores, base_mean, goal, at)
    level_RC = np.broadcast_to(level_R[:, None], (len(level_R), arm.scores.shape[1]))
    half_C = half_widths(
        arm.scores,
        level_RC,
        paired=paired,
        arm_error_C=_error_of(arm),
        other_error_C=_error_of(base)[at],
    )
    soonest = float(time_to(arm_mean + half_C, arm_seconds, goal, interpolated=interpolated))
    latest = float(time_to(arm_mean - half_C, arm_seconds, goal, interpolated=interpolated))
    # a checkpoint that one run has, and so no interval, may be the one that counts
    low = min(float(time_ratio(base_time, latest)), result.speedup)
    high = max(float(time_ratio(base_time, soonest)), result.speedup)
    return replace(result, ci_low=low, ci_high=high)


def _first_at(mean_C: Array, goal: float) -> int:
    """Return the first checkpoint at which a mean curve has a score; some checkpoint has it."""
    return int(np.flatnonzero(mean_C >= goal - _ROUNDING * abs(goal))[0])


def _scores_at(scores_RC: Array, mean_C: Array, goal: float, at: int) -> Array:
    """Return the score of each run at the time at which the mean, on a straight line to checkpoint `at`, is `goal`."""
    before = int(np.flatnonzero(~np.isnan(mean_C[:at]))[-1])
    share = (goal - mean_C[before]) / (mean_C[at] - mean_C[before])
    return scores_RC[:, before] + share * (scores_RC[:, at] - scores_RC[:, before])


def _due_of(table: Evaluations, seconds_C: Array) -> Array:
    """Return the nominal time of each checkpoint."""
    if table.due is None:
        return seconds_C
    return table.due


def _end_of(table: Evaluations, mean_C: Array, seconds_C: Array) -> float:
    """Return the nominal time of the last checkpoint that has a mean."""
    return float(_due_of(table, seconds_C)[np.flatnonzero(~np.isnan(mean_C))[-1]])


def _error_of(table: Evaluations) -> Array:
    """Return the standard error of the mean at each checkpoint; NaN if it is unknown."""
    if table.errors is None:
        return np.full(table.scores.shape[1], math.nan)
    return error_of_mean(np.where(np.isnan(table.scores), math.nan, table.errors))
