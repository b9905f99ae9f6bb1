"""The numbers of a comparison: final scores, pairs of arms, speedups, and seconds by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..engines import PHASES
from ..errors import UserError
from ..runs import Run
from ..text import suggest
from .arms import ACCURACIES, Arm, same_seeds
from .comparable import settings_that_differ, why_incomparable
from .intervals import UNKNOWN, Array, Difference, corrected, difference, error_of_mean, t_band
from .statistics import SAME_MOMENT, Curve, Speedup, mean_curve, speedup_to, target_of, time_to
from .text import finite, finite_numbers, one_line


@dataclass(frozen=True)
class Final:
    """An arm's scores at the start, at the end and at the peak of its curve; names as in ``final.csv``."""

    start: float
    final: float
    final_due: float  # nominal second of the final score
    final_seconds: float
    final_runs: int
    final_low: float  # of Student's 95 % interval over runs; NaN with fewer than three
    final_high: float
    peak: float
    peak_seconds: float


@dataclass(frozen=True)
class Cost:
    """Mean seconds of a step over the runs of an arm, total and by phase; NaN if not logged."""

    steps: float
    seconds_per_step: float
    phases: dict[str, float]
    other: float  # outside all phases: data loading, logging, saving


@dataclass(frozen=True, eq=False)
class ArmResult:
    """The numbers of one arm."""

    arm: Arm
    final: Final | None = None  # None without an evaluation
    cost: Cost | None = None  # None without a run directory
    time_to_target: float = math.nan  # inf: not reached; NaN without a target for it, or if it ends too early to know


@dataclass(frozen=True, eq=False)
class ArmPair:
    """An arm against another where both have data: the difference of their scores, and the speedup to the target."""

    arm: Arm
    rival: Arm
    shows: str  # what their difference shows, as declared; may be empty
    due: float  # nominal second of the scores: the last one up to which both have evaluations
    score: float  # of the arm
    rival_score: float
    runs: int  # of the arm that have a score there
    rival_runs: int
    difference: Difference
    over_time: Difference  # of the means over the evaluations after the start; NaN for fewer than two
    speedup: Speedup | None = None  # to the target of the analysis; None without one

    @property
    def differs_in(self) -> list[str]:
        """The settings in which the arms differ."""
        return settings_that_differ(self.arm.config, self.rival.config)

    @property
    def main(self) -> Difference:
        """The difference to state: at the end, or over time if that alone is settled."""
        return self.over_time if self.over_time.settled and not self.difference.settled else self.difference

    @property
    def settled(self) -> bool:
        """Whether one of the two differences is settled."""
        return self.difference.settled or self.over_time.settled

    @property
    def speedup_settled(self) -> bool:
        """Whether the speedup is settled: it follows from the scores, so one of the two differences must be too."""
        return self.speedup is not None and self.speedup.settled and self.settled

    @property
    def is_early(self) -> bool:
        """Whether one of the arms has scores after the time at which they are compared."""
        return max(self.arm.end, self.rival.end) > self.due * SAME_MOMENT

    @property
    def is_running(self) -> bool:
        """Whether a run of the two arms still trains, so that the numbers are those so far."""
        return self.arm.is_running or self.rival.is_running


@dataclass(frozen=True, eq=False)
class Analysis:
    """The numbers of a comparison, from which tables, sentences and figures are made."""

    results: tuple[ArmResult, ...]  # the baseline first
    baseline: Arm | None
    metric: str
    target: float | None  # score of times and speedups: 1 % below the baseline's peak; None if it does not rise
    pairs: tuple[ArmPair, ...]  # as declared
    refused: tuple[tuple[Arm, Arm, str], ...] = ()  # two arms that are not compared, and why

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(result.arm for result in self.results)

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of right answers, which sentences give in percent."""
        return self.is_share_of(self.metric)

    def is_share_of(self, metric: str) -> bool:
        """Whether a metric is a share of right answers, which every output gives in percent."""
        if metric not in ACCURACIES and not metric.startswith("pass@"):
            return False
        curves = [arm.curves[metric] for arm in self.arms if metric in arm.curves]
        # runs of other tools may have percentages already
        return not any(np.nanmax(curve.scores) > 1 for curve in curves)

    @property
    def states(self) -> Counter[str]:
        """Number of runs by state."""
        return Counter(run.state for arm in self.arms for run in arm.runs)

    @property
    def scored(self) -> list[ArmResult]:
        """The results that have a score."""
        return [result for result in self.results if result.final is not None]

    def result_of(self, name: str) -> ArmResult:
        """Return the result of the arm with this name."""
        return {result.arm.name: result for result in self.results}[name]

    @property
    def compared(self) -> list[Arm]:
        """The arms that are compared with another, or all if none is."""
        names = {arm.name for pair in self.pairs for arm in (pair.arm, pair.rival)}
        return [arm for arm in self.arms if arm.name in names or not names]

    @property
    def metrics(self) -> list[str]:
        """The compared metric, then the others that were measured."""
        measured = [metric for arm in self.arms for metric in arm.curves]
        return [*dict.fromkeys([self.metric, *measured])]


def analyse(
    arms: Sequence[Arm], *, baseline: str | None, metric: str, pairs: Sequence[tuple[str, str, str]] = ()
) -> Analysis:
    """Compare arms. An arm without an evaluation is kept, without numbers."""
    base = _find_baseline(arms, baseline)
    ordered = sorted(arms, key=lambda arm: arm is not base)
    reference = base if base is not None and base.has_scores else None
    # the nominal second up to which the scores of the table are
    horizon = reference.end if reference else max((arm.end for arm in arms if arm.has_scores), default=0.0)
    target = None
    if reference is not None:
        peak = target_of(reference.curve)
        # against itself an arm has a problem only if its curve does not rise
        target = None if speedup_to(reference.curve, reference.curve, peak).problem else peak
    by_name = {arm.name: arm for arm in arms}
    # declared pairs of which an arm is missing are skipped; without any, every arm is compared with the baseline
    named = [(by_name[arm], by_name[rival], shows) for arm, rival, shows in pairs if {arm, rival} <= by_name.keys()]
    if not pairs and reference is not None:
        named = [(arm, reference, "") for arm in ordered[1:]]
    compared: list[ArmPair] = []
    refused: list[tuple[Arm, Arm, str]] = []
    for arm, rival, shows in named:
        if not arm.has_scores or not rival.has_scores:
            continue
        reason = _why_not(arm, rival)
        if reason:
            refused.append((arm, rival, reason))
        else:
            compared.append(compare_arms(arm, rival, shows))
    targets: dict[str, float] = {}  # of the arms with the questions of the baseline
    if target is not None and reference is not None:
        alike = [arm for arm in ordered if arm.has_scores and not why_incomparable(arm.runs, reference.runs)]
        targets = dict.fromkeys((arm.name for arm in alike), target)
    # A report shows all of these differences together, so their p-values are corrected together.
    gaps = corrected([*(pair.difference for pair in compared), *(pair.over_time for pair in compared)])
    corrected_pairs = []
    for pair, at_end, over_time in zip(compared, gaps[: len(compared)], gaps[len(compared) :], strict=True):
        score = targets.get(pair.rival.name)
        speedup = None if score is None else speedup_between(pair.arm, pair.rival, score)
        corrected_pairs.append(replace(pair, difference=at_end, over_time=over_time, speedup=speedup))
    return Analysis(
        results=tuple(_result_of(arm, horizon, targets.get(arm.name), alone=not compared) for arm in ordered),
        baseline=base,
        metric=metric,
        target=target,
        pairs=tuple(corrected_pairs),
        refused=tuple(refused),
    )


def _result_of(arm: Arm, horizon: float, target: float | None, *, alone: bool) -> ArmResult:
    """Return the numbers of an arm at the horizon; where nothing is compared, as far as it got."""
    cost = cost_of(arm.runs) if arm.runs else None
    if not arm.has_scores:
        return ArmResult(arm, cost=cost)
    time = math.nan if target is None else time_to(arm.curve.mean, arm.curve.times, target)
    # an arm that ended before the others might have reached the target
    if math.isinf(time) and not arm.is_running and arm.end * SAME_MOMENT < horizon:
        time = math.nan
    return ArmResult(arm, _final_of(arm.curve, arm.end if alone else horizon), cost, time)


def _why_not(arm: Arm, rival: Arm) -> str:
    """Return why two arms that have scores are not compared; empty if they are."""
    reason = why_incomparable(arm.runs, rival.runs)
    if reason:
        return reason
    end = _shared_end(arm, rival)
    if math.isnan(end):
        return "their evaluations have no time in common"
    if end <= 0:
        return "both have scores only at the start"
    return ""


def _shared_end(arm: Arm, rival: Arm) -> float:
    """Return the last nominal second at which both arms have a mean score; NaN if there is none."""
    end = min(arm.end, rival.end)
    times = np.unique(np.concatenate([arm.curve.due, rival.curve.due]))
    for due in reversed(times[times <= end * SAME_MOMENT].tolist()):
        if arm.curve.has_mean(due) and rival.curve.has_mean(due):
            return float(due)
    return math.nan


def compare_arms(arm: Arm, rival: Arm, shows: str = "") -> ArmPair:
    """Compare two arms at the last time at which both have scores."""
    due = _shared_end(arm, rival)  # there is one: see `_why_not`
    scores, errors = arm.curve.at(due)
    rival_scores, rival_errors = rival.curve.at(due)
    paired = same_seeds(arm, rival)
    over_time = UNKNOWN
    times = times_after_start(arm.curve, rival.curve, due)
    if len(times) >= 2:
        means = mean_over(arm.curve, times)
        rival_means = mean_over(rival.curve, times)
        if not np.isnan(means[0]).all() and not np.isnan(rival_means[0]).all():
            over_time = _gap(*means, *rival_means, paired=paired)
    return ArmPair(
        arm=arm,
        rival=rival,
        shows=shows,
        due=due,
        score=float(np.nanmean(scores)),
        rival_score=float(np.nanmean(rival_scores)),
        runs=int((~np.isnan(scores)).sum()),
        rival_runs=int((~np.isnan(rival_scores)).sum()),
        difference=_gap(scores, errors, rival_scores, rival_errors, paired=paired),
        over_time=over_time,
    )


def times_after_start(curve: Curve, rival: Curve, due: float) -> Array:
    """Return the nominal seconds of all evaluations of two arms after the start of both, up to one."""
    start = max(curve.due[0], rival.due[0])
    times = np.unique(np.concatenate([curve.due, rival.due]))
    return times[(times > start) & (times <= due * SAME_MOMENT)]


def mean_over(curve: Curve, times: Array) -> tuple[Array, Array]:
    """Return the mean score of each run over some nominal seconds and the standard error of that mean, each ``[R]``.

    The evaluations of a run draw different completions, so the error of a mean over T of them is the root of the sum
    of their squared errors over T.
    """
    at_times = np.array([curve.at(time) for time in times])  # [T, score and error, R]
    scores = at_times[:, 0].mean(axis=0)
    # a score that lies on a line between two evaluations of a run adds no draws
    evaluations = np.minimum(len(times), (~np.isnan(curve.scores)).sum(axis=1) - 1)
    errors = np.sqrt((at_times[:, 1] ** 2).mean(axis=0) / np.maximum(evaluations, 1))
    return scores, errors


def _gap(scores: Array, errors: Array, rival_scores: Array, rival_errors: Array, *, paired: bool) -> Difference:
    """Return the difference of the mean scores of two arms; runs without a score, which have NaN, do not count."""
    has_score = ~np.isnan(scores)
    rival_has_score = ~np.isnan(rival_scores)
    return difference(
        scores[has_score],
        rival_scores[rival_has_score],
        float(error_of_mean(errors[has_score][:, None])[0]),
        float(error_of_mean(rival_errors[rival_has_score][:, None])[0]),
        paired=paired and np.array_equal(has_score, rival_has_score),
    )


def speedup_between(arm: Arm, rival: Arm, target: float) -> Speedup:
    """Return the speedup of an arm to a score, over another arm; paired by seed if both have the same seeds."""
    return speedup_to(rival.curve, arm.curve, target, paired=same_seeds(arm, rival))


def _find_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """Return the arm of that name; None for no name (or ``none``), and for a single arm of another name."""
    by_name = {arm.name: arm for arm in arms}
    if name in by_name:
        return by_name[name]
    if name is None or name == "none" or len(by_name) == 1:
        return None
    names = ", ".join(map(one_line, by_name))
    raise UserError(
        f"No arm is called {name!r}: the arms are {names}.{suggest(name, by_name)} Name one with --baseline, or 'none'."
    )


def _final_of(curve: Curve, horizon: float) -> Final:
    """Return the scores at the first checkpoint, at the horizon, and at the peak until then."""
    with_mean = np.flatnonzero(~np.isnan(curve.mean))
    due = horizon
    begin = float(curve.due[with_mean[0]])
    # a curve that ends before the horizon, or begins after it, is shown at its end
    if horizon < begin or horizon >= curve.end or not curve.has_mean(horizon):
        at = curve.last(horizon)
        due = curve.end if at is None else float(curve.due[at])
    within = with_mean[curve.due[with_mean] <= due * SAME_MOMENT]
    peak = int(within[np.argmax(curve.mean[within])])
    scores_R, errors_R = curve.at(due)
    low, high = t_band(scores_R[:, None], errors_R[:, None])
    has_score = ~np.isnan(scores_R)
    return Final(
        start=float(curve.mean[with_mean[0]]),
        final=float(mean_curve(scores_R[has_score, None])[0]),
        final_due=due,
        final_seconds=float(np.interp(due, curve.due[with_mean], curve.times[with_mean])),
        final_runs=int(has_score.sum()),
        final_low=float(low[0]),
        final_high=float(high[0]),
        peak=float(curve.mean[peak]),
        peak_seconds=float(curve.times[peak]),
    )


def cost_of(runs: Sequence[Run]) -> Cost:
    """Return steps, seconds a step and seconds by phase: the mean of each run, then the mean over runs."""
    steps = []
    seconds_per_step = []
    phases_of_runs: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for run in runs:
        rows = [row for row in run.metrics if (finite(row.get("step")) or 0) > 0]
        if not rows:
            continue
        step = float(rows[-1]["step"])
        seconds = finite(rows[-1].get("seconds"))
        steps.append(step)
        if seconds is not None:
            seconds_per_step.append(seconds / step)
        for phase, of_runs in phases_of_runs.items():
            of_runs.append(_mean(row.get(f"pods/seconds/{phase}") for row in rows))
    phases = {phase: _mean(of_runs) for phase, of_runs in phases_of_runs.items()}
    per_step = _mean(seconds_per_step)
    outside = max(per_step - float(np.nansum([*phases.values()])), 0.0)
    return Cost(_mean(steps), per_step, phases, outside)


def _mean(values: Iterable[object]) -> float:
    """Return the mean of the numbers among logged values; NaN if there is none."""
    numbers = finite_numbers(values)
    return float(np.mean(numbers)) if numbers else math.nan
