"""The numbers of a comparison: final scores, pairs of arms, speedups, and seconds by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..engines import PHASES
from ..errors import UserError
from ..runs import Run
from ..text import suggest
from .arms import ACCURACIES, Arm, rollouts_of, same_seeds
from .comparable import refusal
from .contrasts import contrasts, most_varied, things
from .intervals import UNKNOWN, Z_95, Array, Difference, corrected, difference, error_of_mean, t_band
from .statistics import SAME_MOMENT, Curve, Speedup, level_of, mean_curve, speedup_to
from .text import finite, finite_numbers, plain


@dataclass(frozen=True)
class Final:
    """An arm's scores at the start, at the end and at the peak of its curve."""

    start: float
    final: float
    final_due: float  # nominal second of the final score
    final_seconds: float
    final_runs: int
    low: float  # of Student's 95 % interval over runs; NaN with one run
    high: float
    peak: float
    peak_seconds: float
    error: float  # of the final score, from the evaluations' own standard errors; NaN if they are unknown


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
    speedup: Speedup | None = None  # against the baseline; None if not compared
    refused: str = ""  # why the arm is not compared with the baseline; empty if it is

    @property
    def margin(self) -> float:
        """1.96 standard errors of a single run's evaluation; NaN for several runs, which have an interval instead."""
        if self.final is None or not self.arm.is_single:
            return math.nan
        return Z_95 * self.final.error


@dataclass(frozen=True, eq=False)
class Pair:
    """An arm against another where both have data: the difference of their scores, and the speedup to its level."""

    arm: Arm
    rival: Arm
    due: float  # nominal second of the scores: the last one up to which both have evaluations
    score: float  # of the arm
    rival_score: float
    runs: int  # of the arm that have a score there
    rival_runs: int
    difference: Difference
    over_time: Difference | None  # of the means over the evaluations after the start; None for fewer than two
    speedup: Speedup
    differs_in: tuple[str, ...] | None  # in words; None if a recipe is unknown
    shows: str = ""  # what the pair shows, if it is stated first; else empty

    @property
    def is_early(self) -> bool:
        """Whether one of the arms has scores after the time at which they are compared."""
        return not (self.arm.ends_by(self.due) and self.rival.ends_by(self.due))

    @property
    def is_running(self) -> bool:
        """Whether a run of the two arms still trains, so that the numbers are those so far."""
        return self.arm.is_running or self.rival.is_running

    @property
    def ended(self) -> Arm | None:
        """The arm that has no score after the time at which they are compared; None if both have one."""
        for arm in (self.arm, self.rival):
            if arm.ends_by(self.due):
                return arm
        return None


@dataclass(frozen=True, eq=False)
class Analysis:
    """The numbers of a comparison, from which tables, sentences and figures are made."""

    results: tuple[ArmResult, ...]  # the baseline first
    baseline: Arm | None
    metric: str
    horizon: float  # nominal second up to which the scores of the table are: the baseline's end, else the last one
    pairs: tuple[Pair, ...]  # the one that the experiment is about first
    stated: tuple[Pair, ...] = ()  # those that show one thing, in the order of the sentences

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(result.arm for result in self.results)

    @property
    def subject(self) -> Arm | None:
        """The arm that the experiment is about; None if no arms are compared."""
        if not self.pairs:
            return None
        return self.pairs[0].arm

    @property
    def level(self) -> float | None:
        """The score to which speedups against the baseline are; None if no speedup can be measured."""
        if self.baseline is None:
            return None
        speedup = self.result_of(self.baseline.name).speedup
        # against itself the baseline has a problem only if its curve does not rise
        if speedup is None or speedup.problem or not math.isfinite(speedup.threshold):
            return None
        return speedup.threshold

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of right answers, which sentences give in percent."""
        return self.is_share_of(self.metric)

    def is_share_of(self, metric: str) -> bool:
        """Whether a metric is a share of right answers, which every output gives in percent."""
        if metric not in ACCURACIES and not metric.startswith("pass@"):
            return False
        highest = 0.0
        for arm in self.arms:
            if metric in arm.curves:
                highest = max(highest, float(np.nanmax(arm.curves[metric].scores)))
        return highest <= 1  # a CSV may have percentages already

    def pair_with_baseline(self, arm: Arm) -> Pair | None:
        """Return the comparison of an arm with the baseline; None if there is none."""
        for pair in self.pairs:
            if pair.arm is arm and pair.rival is self.baseline:
                return pair
        return None

    @property
    def states(self) -> Counter[str]:
        """Number of runs by state."""
        states: Counter[str] = Counter()
        for arm in self.arms:
            states.update(run.state for run in arm.runs)
        return states

    @property
    def scored(self) -> list[ArmResult]:
        """The results that have a score."""
        return [result for result in self.results if result.final is not None]

    def result_of(self, name: str) -> ArmResult:
        """Return the result of the arm with this name."""
        for result in self.results:
            if result.arm.name == name:
                return result
        raise KeyError(name)

    @property
    def compared(self) -> list[Arm]:
        """The arms that are compared with another, or all if none is."""
        if not self.pairs:
            return [*self.arms]
        names: set[str] = set()
        for pair in self.pairs:
            names |= {pair.arm.name, pair.rival.name}
        return [arm for arm in self.arms if arm.name in names]

    @property
    def metrics(self) -> list[str]:
        """The compared metric, then the others that were measured."""
        metrics = {self.metric: None}
        for arm in self.arms:
            metrics |= dict.fromkeys(arm.curves)
        return [*metrics]


def analyse(
    arms: Sequence[Arm], *, baseline: str | None, metric: str, shows: Mapping[str, str] | None = None
) -> Analysis:
    """Compare arms. An arm without an evaluation is kept, without numbers.

    Args:
        arms: the arms; their names differ.
        baseline: name of the arm that the others are measured against, or None for no comparison.
        metric: name of the score, for sentences.
        shows: what an arm shows, by its name, where the experiment declares it.

    Raises:
        UserError: when none of several arms has the baseline's name. A single arm needs no baseline.
    """
    base = _find_baseline(arms, baseline)
    ordered = sorted(arms, key=lambda arm: arm is not base)
    reference = base if base is not None and base.has_scores else None
    ends = [arm.end for arm in arms if arm.has_scores]
    horizon = reference.end if reference else max(ends, default=0.0)
    results = [_result_of(arm, reference, horizon) for arm in ordered]
    compared = [result.arm for result in results if result.speedup]
    pairs = []
    for arm, rival in _pairs(compared, base):
        if not _why_not(arm, rival):
            pairs.append(compare(arm, rival))
    stated = []
    if pairs:
        assert base is not None
        for contrast in contrasts(compared, base, pairs[0].arm, shows or {}):
            if _why_not(contrast.arm, contrast.rival):
                continue
            pair = replace(compare(contrast.arm, contrast.rival), shows=contrast.shows)
            stated.append(pair)
            _put(pair, pairs)
    # those that sentences are about, and those of the table only
    first = _corrected([*stated, *(pair for pair in pairs[:1] if pair not in stated)], *pairs[:1])
    rest = _corrected([pair for pair in pairs[1:] if pair not in stated])
    by_arms = {(pair.arm, pair.rival): pair for pair in (*first, *rest)}
    return Analysis(
        results=tuple(results),
        baseline=base,
        metric=metric,
        horizon=horizon,
        pairs=tuple(by_arms[pair.arm, pair.rival] for pair in pairs),
        stated=tuple(first[: len(stated)]),
    )


def _corrected(pairs: Sequence[Pair], subject: Pair | None = None) -> list[Pair]:
    """Return pairs that are looked at together, with p-values for all of their differences, at the end and over time.

    The subject against the baseline, which is the question of an experiment, begins with half of the 5 %. A speedup
    follows from the scores, so it is settled only if one of the two differences is.
    """
    at_end = [pair.difference for pair in pairs]
    over_time = [pair.over_time or UNKNOWN for pair in pairs]
    weights = [len(pairs) - 1.0 if pair is subject and len(pairs) > 1 else 1.0 for pair in pairs]
    all_differences = corrected([*at_end, *over_time], weights * 2)
    found = []
    for pair, at_end_now, over_time_now in zip(
        pairs, all_differences[: len(pairs)], all_differences[len(pairs) :], strict=True
    ):
        may_be_settled = at_end_now.settled or over_time_now.settled
        found.append(
            replace(
                pair,
                difference=at_end_now,
                over_time=pair.over_time and over_time_now,
                speedup=replace(pair.speedup, may_be_settled=may_be_settled),
            )
        )
    return found


def _put(pair: Pair, pairs: list[Pair]) -> None:
    """Add a stated pair to all pairs; it replaces the pair of the same two arms if there is one."""
    for place, other in enumerate(pairs):
        if {pair.arm, pair.rival} == {other.arm, other.rival}:
            pairs[place] = pair
            return
    pairs.append(pair)


def _result_of(arm: Arm, reference: Arm | None, horizon: float) -> ArmResult:
    """Return the numbers of an arm, and its speedups if it can be compared with the reference."""
    cost = cost_of(arm.runs) if arm.runs else None
    if arm.curve is None or not arm.has_scores:
        return ArmResult(arm, cost=cost)
    refused = ""
    if reference is not None and arm is not reference:
        refused = _why_not(arm, reference)
    if reference is None or refused:
        # an arm that is compared with nothing is shown as far as it got
        return ArmResult(arm, _final_of(arm.curve, arm.end), cost, refused=refused)
    return ArmResult(arm, _final_of(arm.curve, horizon), cost, _speedup(arm, reference))


def _why_not(arm: Arm, rival: Arm) -> str:
    """Return why two arms that have scores are not compared; empty if they are."""
    reason = refusal(arm.runs, rival.runs)
    if reason:
        return reason
    end = _shared_end(arm, rival)
    if end is None:
        return "their evaluations have no time in common"
    if end <= 0:
        return "both have scores only at the start"
    return ""


def _shared_end(arm: Arm, rival: Arm) -> float | None:
    """Return the last nominal second at which both arms have a mean score; None if there is none."""
    if arm.curve is None or rival.curve is None:
        return None
    end = min(arm.end, rival.end)
    latest = end * SAME_MOMENT
    times = np.unique(np.concatenate([arm.curve.due, rival.curve.due]))
    for due in reversed(times.tolist()):
        if due <= latest and arm.curve.has_mean(due) and rival.curve.has_mean(due):
            return float(due)
    return None


def compare(arm: Arm, rival: Arm) -> Pair:
    """Compare two arms at the last time at which both have scores."""
    due = _shared_end(arm, rival)
    assert due is not None  # checked by `_why_not`
    assert arm.curve
    assert rival.curve
    scores, errors = arm.curve.at(due)
    rival_scores, rival_errors = rival.curve.at(due)
    order = same_seeds(arm, rival)
    return Pair(
        arm=arm,
        rival=rival,
        due=due,
        score=float(np.nanmean(scores)),
        rival_score=float(np.nanmean(rival_scores)),
        runs=int((~np.isnan(scores)).sum()),
        rival_runs=int((~np.isnan(rival_scores)).sum()),
        difference=_gap(scores, errors, rival_scores, rival_errors, order),
        over_time=_over_time(arm.curve, rival.curve, due, order),
        speedup=_speedup(arm, rival),
        differs_in=things(arm, rival),
    )


def _over_time(curve: Curve, rival: Curve, due: float, order: Sequence[int] | None) -> Difference | None:
    """Return the difference of the mean scores after the start, up to a nominal second; None for fewer than two scores.

    The evaluations of a run draw different completions, so the error of a mean over T of them is the root of the sum
    of their squared errors over T.

    Args:
        curve, rival: of the two arms.
        due: nominal second of the last score.
        order: of the rival's runs, by the seeds of the arm's; None if the seeds are not the same.
    """
    times = times_after_start(curve, rival, due)
    if len(times) < 2:
        return None
    ours, errors = mean_over(curve, times)
    theirs, rival_errors = mean_over(rival, times)
    if np.isnan(ours).all() or np.isnan(theirs).all():
        return None
    return _gap(ours, errors, theirs, rival_errors, order)


def times_after_start(curve: Curve, rival: Curve, due: float) -> Array:
    """Return the nominal seconds of all evaluations of two arms after the start of both, up to one."""
    start = max(curve.due[0], rival.due[0])
    times = np.unique(np.concatenate([curve.due, rival.due]))
    return times[(times > start) & (times <= due * SAME_MOMENT)]


def mean_over(curve: Curve, times: Array) -> tuple[Array, Array]:
    """Return the mean score of each run over some nominal seconds and the standard error of that mean, each ``[R]``."""
    at_times = np.array([curve.at(time) for time in times])  # [T, score and error, R]
    scores = at_times[:, 0].mean(axis=0)
    evaluations = np.minimum(len(times), (~np.isnan(curve.scores)).sum(axis=1) - 1)  # others lie between two of them
    errors = np.sqrt((at_times[:, 1] ** 2).mean(axis=0) / np.maximum(evaluations, 1))
    return scores, errors


def _gap(
    scores: Array, errors: Array, rival_scores: Array, rival_errors: Array, order: Sequence[int] | None
) -> Difference:
    """Return the difference of the mean scores of two arms; runs without a score, which have NaN, do not count."""
    paired = False
    if order is not None:
        rival_scores = rival_scores[order]
        rival_errors = rival_errors[order]
        paired = bool((np.isnan(scores) == np.isnan(rival_scores)).all())
    has_score = ~np.isnan(scores)
    rival_has_score = ~np.isnan(rival_scores)
    return difference(
        scores[has_score],
        rival_scores[rival_has_score],
        float(error_of_mean(errors[has_score][:, None])[0]),
        float(error_of_mean(rival_errors[rival_has_score][:, None])[0]),
        paired=paired,
    )


def _speedup(arm: Arm, rival: Arm) -> Speedup:
    """Return the speedup of an arm to 99 % of the peak of another, with an interval unless it is the same arm."""
    assert rival.curve
    found = speedup_between(arm, rival, level_of(rival.curve))
    return replace(found, ci_low=math.nan, ci_high=math.nan) if arm is rival else found


def speedup_between(arm: Arm, rival: Arm, target: float) -> Speedup:
    """Return the speedup of an arm to a score, over another arm; paired by seed if both have the same seeds."""
    assert arm.curve
    assert rival.curve
    order = same_seeds(arm, rival)
    theirs = rival.curve if order is None else rival.curve.in_order(order)
    return speedup_to(theirs, arm.curve, target, paired=order is not None)


def _find_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """Return the arm of that name; None for no name (or ``none``), and for a single arm of another name."""
    by_name = {arm.name: arm for arm in arms}
    if name in by_name:
        return by_name[name]
    if name is None or name == "none" or len(by_name) == 1:
        return None
    names = ", ".join(map(plain, by_name))
    raise UserError(
        f"No arm is called {name!r}: the arms are {names}.{suggest(name, by_name)} Name one with --baseline, or 'none'."
    )


def _pairs(arms: Sequence[Arm], base: Arm | None) -> list[tuple[Arm, Arm]]:
    """Return the pairs that the experiment is about, none without a baseline.

    The first is the subject of the experiment against the baseline. Then follow all others against the baseline, and
    the subject against them.
    """
    if base is None or base not in arms or len(arms) == 1:
        return []
    subject = _subject(arms, base)
    rest = [arm for arm in arms if arm not in (base, subject)]
    return [(arm, base) for arm in (subject, *rest)] + [(subject, arm) for arm in rest]


def _subject(arms: Sequence[Arm], base: Arm) -> Arm:
    """Return the arm that an ablation varies, else the first that drops rollouts, else the first; not the baseline.

    Single runs make no ablation, which would show only that runs differ.
    """
    varied = most_varied([arm for arm in arms if not arm.is_single])
    if varied is not None and varied is not base:
        return varied
    others = [arm for arm in arms if arm is not base]
    for arm in others:
        n, m = rollouts_of(arm.config)
        if n != m:
            return arm
    return others[0]


def _final_of(curve: Curve, horizon: float) -> Final:
    """Return the scores at the first checkpoint, at the horizon, and at the peak until then.

    A curve that ends before the horizon is shown at its end, and so is one that begins after it. Between two
    checkpoints the score at the horizon is on a straight line.
    """
    at = curve.last(horizon)
    if at is None:
        at = curve.last()
    assert at is not None  # the curve has a mean somewhere
    with_mean = np.flatnonzero(~np.isnan(curve.mean))
    start = int(with_mean[0])
    within = with_mean[with_mean <= at]
    peak = int(within[np.argmax(curve.mean[within])])
    due = float(curve.due[at])
    seconds = float(curve.times[at])
    if due * SAME_MOMENT < horizon < curve.end and curve.has_mean(horizon):
        due = horizon
        seconds = float(np.interp(horizon, curve.due[with_mean], curve.times[with_mean]))
    scores_R, errors_R = curve.at(due)
    low, high = t_band(scores_R[:, None], errors_R[:, None])
    has_score = ~np.isnan(scores_R)
    scores = scores_R[has_score]
    errors = errors_R[has_score]
    return Final(
        start=float(curve.mean[start]),
        final=float(mean_curve(scores[:, None])[0]),
        final_due=due,
        final_seconds=seconds,
        final_runs=len(scores),
        low=float(low[0]),
        high=float(high[0]),
        peak=float(curve.mean[peak]),
        peak_seconds=float(curve.times[peak]),
        error=float(np.linalg.norm(errors) / len(errors)),
    )


def cost_of(runs: Sequence[Run]) -> Cost:
    """Return steps, seconds a step and seconds by phase: the mean of each run, then the mean over runs."""
    steps = []
    seconds_per_step = []
    phases_of_runs: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for run in runs:
        rows = _rows_of_steps(run)
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


def _rows_of_steps(run: Run) -> list[Mapping[str, Any]]:
    """Return the logged rows that have the number of a step."""
    rows: list[Mapping[str, Any]] = []
    for row in run.metrics:
        step = finite(row.get("step"))
        if step is not None and step > 0:
            rows.append(row)
    return rows


def _mean(values: Iterable[object]) -> float:
    """Return the mean of the numbers among logged values; NaN if there is none."""
    numbers = finite_numbers(values)
    if not numbers:
        return math.nan
    return float(np.mean(numbers))
