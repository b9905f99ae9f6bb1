"""Mean curves, the times at which they reach a score, and speedups.

Axes: R runs (seeds) of one arm, C checkpoints. Scores and seconds are ``[R, C]``, NaN if a run has no evaluation at
that checkpoint (it failed or was killed earlier, or it still trains).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .intervals import FEWEST, SPEEDUP_DIGITS, Z_95, Array, error_of_mean, excludes, half_widths, t_band

SHARE_OF_PEAK = 0.99
"""Share of the baseline's peak that an arm has to reach: the authors' rule."""

FLAT = "flat"
"""The baseline does not rise from its first evaluation to the target by more than the interval of this rise."""

NEVER = "never"
"""Neither arm reaches the score."""

SHORT = "short"
"""One arm ends below the target, and earlier than the other reaches it, so the ratio is unknown."""

_ROUNDING = 1e-12  # the means of two and of three runs at 0.8 differ in the last digit

SAME_MOMENT = 1 + 1e-9
"""Times up to this factor later count as the same nominal second: read and computed ones differ in the last digit."""

Mask = NDArray[np.bool_]


def mean_curve(scores_RC: ArrayLike, ended_R: Mask | None = None) -> Array:
    """Return the mean over the runs that have each checkpoint, ``[C]``.

    A checkpoint that half of the runs or fewer have is NaN: a mean over the one run that lived longest says nothing
    about the arm. A run that still trains does not count as missing next to runs that have ended, by default all.

    >>> mean_curve([[0.2, 0.4, 0.9], [0.4, 0.6, np.nan], [0.3, np.nan, np.nan]]).round(3)
    array([0.3, 0.5, nan])
    >>> mean_curve([[0.2, 0.4], [0.4, np.nan]], np.array([True, False])).round(3)
    array([0.3, 0.4])
    """
    scores = np.asarray(scores_RC, dtype=np.float64)
    present = ~np.isnan(scores)
    count_C = present.sum(axis=0)
    total_C = np.where(present, scores, 0.0).sum(axis=0)
    has_mean_C = 2 * count_C > len(scores)
    if ended_R is not None and ended_R.any():
        has_mean_C |= 2 * present[ended_R].sum(axis=0) > ended_R.sum()
    return np.where(has_mean_C, total_C / np.maximum(count_C, 1), np.nan)


def time_to(mean_C: ArrayLike, time_C: ArrayLike, target: float) -> float:
    """Return the time at which a mean curve first reaches a score, on straight lines between checkpoints.

    Return inf if it never does. A curve that starts at the target or above has the time of its first checkpoint. NaN
    checkpoints are skipped, and equal counts as reached, however a mean was rounded.

    >>> round(time_to([0.2, 0.6, 0.8], [0, 10, 20], 0.7), 6), time_to([0.2, 0.6], [0, 10], 0.7)
    (15.0, inf)
    """
    mean = np.asarray(mean_C, dtype=np.float64)
    time = np.asarray(time_C, dtype=np.float64)
    known = ~(np.isnan(mean) | np.isnan(time))
    mean = mean[known]
    time = time[known]
    reached = np.flatnonzero(mean >= target - _ROUNDING * abs(target))
    if len(reached) == 0:
        return math.inf
    at = reached[0]
    if at == 0 or math.isinf(target):
        return float(time[at])
    share = min((target - mean[at - 1]) / (mean[at] - mean[at - 1]), 1.0)
    return float(time[at - 1] + share * (time[at] - time[at - 1]))


def time_ratio(baseline_time: float, arm_time: float) -> float:
    """Return baseline time over arm time, defined for every pair of times; NaN if the baseline has none.

    >>> [time_ratio(*times) for times in ((60, 30), (60, math.inf), (60, 0), (0, 0))]
    [2.0, 0.0, inf, 1.0]
    """
    if not math.isfinite(baseline_time):
        return math.nan
    if baseline_time == arm_time:
        return 1.0
    if arm_time == 0:
        return math.inf
    return baseline_time / arm_time


@dataclass(frozen=True, eq=False)
class Curve:
    """One arm's evaluations: R runs, C checkpoints on one clock of nominal seconds."""

    runs: tuple[str, ...]
    due: Array  # [C] nominal seconds
    seconds: Array  # [R, C] real seconds of training clock; NaN if a run has no such checkpoint
    scores: Array  # [R, C]
    errors: Array  # [R, C] standard error of each evaluation; NaN if it is unknown
    ended: Mask | None = None  # [R] which runs have ended; None for all

    @cached_property
    def mean(self) -> Array:
        return mean_curve(self.scores, self.ended)

    @cached_property
    def times(self) -> Array:
        """Mean of the real seconds over runs."""
        return mean_curve(self.seconds, self.ended)

    @cached_property
    def interval(self) -> tuple[Array, Array]:
        """Student's 95 % interval over the runs, low and high, each ``[C]``; NaN where fewer than three have one."""
        return t_band(self.scores, self.errors)

    @property
    def error(self) -> Array:
        """Standard error that the evaluations give the mean at each checkpoint, ``[C]``; NaN if it is unknown."""
        return error_of_mean(np.where(np.isnan(self.scores), math.nan, self.errors))

    def has_mean(self, due: float) -> bool:
        """Whether enough runs have a score at a nominal second (`mean_curve`)."""
        scores, _ = self.at(due)
        return not np.isnan(mean_curve(scores[:, None], self.ended)[0])

    def last(self, horizon: float = math.inf) -> int | None:
        """Return the last checkpoint with a mean, no later than ``horizon`` nominal seconds; None if there is none."""
        usable = np.flatnonzero(~np.isnan(self.mean) & (self.due <= horizon * SAME_MOMENT))
        return int(usable[-1]) if len(usable) else None

    @property
    def end(self) -> float:
        """Nominal seconds of the last checkpoint with a mean; NaN if there is none."""
        at = self.last()
        return math.nan if at is None else float(self.due[at])

    def at(self, due: float) -> tuple[Array, Array]:
        """Return score and standard error of each run at a nominal second, each ``[R]``.

        Between two checkpoints, both are on a straight line, also where few runs have the checkpoint, since one step
        may be longer than the interval between evaluations. A run that has not begun or has ended has NaN.
        """
        exact = np.flatnonzero(np.isclose(self.due, due, rtol=1e-9, atol=1e-9))
        if len(exact) and not np.isnan(self.mean[exact[0]]):
            return self.scores[:, exact[0]], self.errors[:, exact[0]]
        scores = np.array([self._between(due, row) for row in self.scores])
        errors = np.array([self._between(due, row) for row in self.errors])
        return scores, errors

    def _between(self, due: float, values: Array) -> float:
        """Interpolate the values of one run, ``[C]``, skipping checkpoints that it does not have."""
        measured = ~np.isnan(values)
        if not measured.any():
            return math.nan
        return float(on_a_line(np.array([due]), self.due[measured], values[measured])[0])


NO_EVALUATIONS = Curve((), np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0)), np.zeros((0, 0)))
"""The curve of an arm before a run has been evaluated."""


def on_a_line(due: Array, times: Array, values: Array) -> Array:
    """Interpolate linearly; NaN before the first time and after the last."""
    return np.interp(due, times, values, left=math.nan, right=math.nan)


@dataclass(frozen=True)
class Speedup:
    """The speedup of an arm to a score; times in the unit of the given seconds."""

    baseline_time: float
    arm_time: float  # inf: not reached
    speedup: float  # 0: never reached; inf: reached at time 0; NaN: see `problem`
    ci_low: float = math.nan  # NaN with fewer than three runs on either side
    ci_high: float = math.nan
    problem: str = ""  # FLAT, NEVER or SHORT: why there is no speedup

    @property
    def settled(self) -> bool:
        """Whether the printed interval excludes 1."""
        return excludes(self.ci_low, self.ci_high, 1.0, SPEEDUP_DIGITS)

    @property
    def never_reached(self) -> bool:
        """Whether the arm's mean does not reach the target, although it trained as long as the baseline needs."""
        return math.isinf(self.arm_time) and not self.problem


def target_of(baseline: Curve) -> float:
    """Return the score that speedups against a baseline are to: 1 % below the peak of its mean curve."""
    peak = float(np.fmax.reduce(baseline.mean))  # NaN checkpoints are skipped
    share = SHARE_OF_PEAK if peak >= 0 else 2 - SHARE_OF_PEAK
    return share * peak


def speedup_to(baseline: Curve, arm: Curve, target: float, *, paired: bool = False) -> Speedup:
    """Return the speedup of an arm to a score: the baseline's time to it over the arm's time.

    The interval is that of the arm's time, by Student's t on scores: at each checkpoint of the arm the 95 % interval of
    the difference between the arm's score there and the baseline's score where it reaches the target. The arm may be at
    the target from the first checkpoint at which the interval's upper end is, and is there from the first one at which
    the lower end is. If the lower end never is, the arm may never reach it, and the interval begins at 0. If the
    baseline never reaches the target, the two arms are swapped: the interval is that of the baseline's time to the
    arm's scores where the arm reaches it.

    A checkpoint's time is the mean of its seconds over runs. The arm may have other runs and checkpoints. If `paired`,
    the same row of both is the same seed.

    Returns:
        The speedup is 0 if only the baseline reaches the target, and infinite if only the arm does. With fewer than
        three runs on either side the interval is NaN. There is no speedup (NaN) if neither arm reaches the target, if
        the baseline does not rise to it by more than the interval of this rise, or if one arm ends below it before the
        other reaches it.

    >>> clock = np.array([[0.0, 30.0, 60.0]] * 2)
    >>> grpo = Curve(("1", "2"), clock[0], clock, np.array([[0.2, 0.4, 0.6]] * 2), np.zeros((2, 3)))
    >>> pods = replace(grpo, scores=np.array([[0.2, 0.6, 0.8]] * 2))
    >>> [round(speedup_to(grpo, pods, target).speedup, 2) for target in (0.4, 0.6, 0.7, 0.9, 0.2)]
    [2.0, 2.0, inf, nan, nan]
    """
    result = _compare(baseline, arm, target, paired=paired)
    if result.problem == FLAT or not math.isinf(result.baseline_time):
        return result
    swapped = _compare(arm, baseline, target, paired=paired)
    if math.isinf(swapped.baseline_time):
        return replace(swapped, problem=NEVER)
    # Swap the arms back.
    return replace(
        swapped,
        baseline_time=math.inf,
        arm_time=swapped.baseline_time,
        speedup=math.nan if swapped.problem else math.inf,
        ci_low=_inverse(swapped.ci_high),
        ci_high=_inverse(swapped.ci_low),
    )


def _inverse(ratio: float) -> float:
    return math.inf if ratio == 0 else 1 / ratio


def _compare(base: Curve, arm: Curve, target: float, *, paired: bool) -> Speedup:
    """Return the speedup to a score that the baseline reaches."""
    base_mean = base.mean
    arm_mean = arm.mean
    arm_times = arm.times
    base_time = time_to(base_mean, base.times, target)
    arm_time = time_to(arm_mean, arm_times, target)
    result = Speedup(base_time, arm_time, math.nan)
    if math.isnan(target) or np.isnan(arm_mean).all() or math.isinf(base_time):
        return result
    at = int(np.flatnonzero(base_mean >= target - _ROUNDING * abs(target))[0])
    if not _rises_to(base, target, at):
        return replace(result, problem=FLAT)
    # by nominal seconds, since the last step of each run ends at another real second
    if math.isinf(arm_time) and arm.end < base.due[at] * (1 - 1e-9):
        return replace(result, problem=SHORT)
    result = replace(result, speedup=time_ratio(base_time, arm_time))
    if min(len(base.scores), len(arm.scores)) < FEWEST:
        return result
    at_target_R = _scores_at(base.scores, base_mean, target, at)
    at_target_RC = np.broadcast_to(at_target_R[:, None], (len(at_target_R), arm.scores.shape[1]))
    half_C = half_widths(arm.scores, at_target_RC, paired=paired, arm_error_C=arm.error, other_error_C=base.error[at])
    soonest = time_to(arm_mean + half_C, arm_times, target)
    latest = time_to(arm_mean - half_C, arm_times, target)
    # a checkpoint that one run has, and so no interval, may be the one that counts
    low = min(time_ratio(base_time, latest), result.speedup)
    high = max(time_ratio(base_time, soonest), result.speedup)
    return replace(result, ci_low=low, ci_high=high)


def _rises_to(base: Curve, target: float, at: int) -> bool:
    """Whether the mean rises from its first checkpoint to the score by more than the 95 % interval of this rise."""
    start = int(np.flatnonzero(~np.isnan(base.mean))[0])
    if at == start:
        return False
    rise = target - base.mean[start]
    (half,) = half_widths(
        _scores_at(base.scores, base.mean, target, at)[:, None],
        base.scores[:, [start]],
        paired=True,
        arm_error_C=base.error[[at]],
        other_error_C=base.error[[start]],
    )
    if len(base.scores) == 1:
        half = Z_95 * math.hypot(*np.nan_to_num(base.error[[start, at]]))
    return not rise <= half  # without an interval, any rise counts


def _scores_at(scores_RC: Array, mean_C: Array, target: float, at: int) -> Array:
    """Return the score of each run where the mean, on a straight line to checkpoint `at`, is the target."""
    before = int(np.flatnonzero(~np.isnan(mean_C[:at]))[-1])
    share = (target - mean_C[before]) / (mean_C[at] - mean_C[before])
    return scores_RC[:, before] + share * (scores_RC[:, at] - scores_RC[:, before])
