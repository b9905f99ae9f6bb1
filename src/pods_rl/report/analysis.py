"""The numbers of a report: final scores, pairs of arms, speedups, ablations, and seconds by phase."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engines import PHASES
from ..errors import UserError
from ..runs import Run
from ..text import suggest
from .arms import Arm, Curve, rollouts_of, same_seeds
from .comparable import refusal
from .intervals import Array, Difference, difference, error_of_mean, t_band
from .pooling import NO_MATTER, OWN_TO_A_RUN, in_order
from .statistics import Evaluations, Speedup, mean_curve, speedups
from .text import finite, plain

AXES = {
    "n": "rollouts generated (n)",
    "m": "rollouts kept (m)",
    "rule": "selection rule",
    "advantages": "advantages",
}
"""What an ablation varies."""

_EVERY_PAIR = 4  # with up to this many arms every pair is compared
_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Final:
    """An arm's scores at the ends of its curve; NaN intervals with one run."""

    start: float
    final: float
    final_due: float  # nominal second of the final score
    final_seconds: float
    final_runs: int
    scores: Array  # of these runs
    low: float  # of Student's 95 % interval over runs
    high: float
    peak: float
    peak_seconds: float
    error: float  # of the final score, from the evaluations' own standard errors; NaN if they are not known


@dataclass(frozen=True)
class Cost:
    """Mean seconds of a step over the runs of an arm, total and by phase; NaN if not logged."""

    steps: float
    seconds_per_step: float
    phases: dict[str, float]
    other: float  # outside all phases: data loading, logging, saving


@dataclass(frozen=True, eq=False)
class Pair:
    """An arm against another where both have data: the difference of their scores, and the speedup to its level."""

    arm: Arm
    other: Arm
    due: float  # nominal second of the scores: the last one up to which both have evaluations
    score: float  # of the arm
    other_score: float
    runs: int  # of the arm that have a score there
    other_runs: int
    difference: Difference
    speedup: Speedup


@dataclass(frozen=True, eq=False)
class Ablation:
    """Arms that differ from the reference in one setting, and the value each has; in order of the values."""

    axis: str
    reference: Arm
    arms: tuple[Arm, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """All that the figures, tables and sentences are made from."""

    arms: tuple[Arm, ...]  # the baseline first
    baseline: Arm | None
    metric: str
    horizon: float  # nominal second up to which the scores of the table are: the baseline's end, else the last one
    speedups: dict[str, tuple[Speedup, ...]]  # of each arm against the baseline, by the authors' rule first
    finals: dict[str, Final]
    costs: dict[str, Cost]
    ablations: tuple[Ablation, ...]
    pairs: tuple[Pair, ...]  # the one that the experiment is about first
    refused: Mapping[str, str]  # why an arm is not compared with the baseline, by name

    @property
    def compared(self) -> list[Arm]:
        """The arms that are compared with another, or all if none is."""
        names = {arm.name for pair in self.pairs for arm in (pair.arm, pair.other)}
        return [arm for arm in self.arms if arm.name in names] or list(self.arms)

    def speedup_of(self, arm: str) -> Speedup | None:
        """Return the speedup against the baseline by the authors' rule."""
        return self.speedups[arm][0] if arm in self.speedups else None

    @property
    def metrics(self) -> list[str]:
        """The compared metric, then the others that were measured."""
        return [*dict.fromkeys([self.metric, *(name for arm in self.arms for name in arm.curves)])]


def analyse(arms: Sequence[Arm], *, baseline: str | None, metric: str) -> Analysis:
    """Compare arms; one without an evaluation is kept, and shown without numbers.

    Args:
        baseline: name of the arm that the others are measured against, or None for no comparison.
        metric: name of the score, for sentences.

    Raises:
        UserError: when none of several arms has the baseline's name. A single arm needs no baseline.
    """
    base = _find_baseline(arms, baseline)
    ordered = tuple(sorted(arms, key=lambda arm: arm is not base))
    curves = {arm.name: arm.curve for arm in ordered if arm.curve and arm.curve.last() is not None}
    scored = [arm for arm in ordered if arm.name in curves]
    reference = base if base in scored else None
    refused = {}
    for arm in scored:
        reason = _why_not(arm, reference) if reference and arm is not reference else ""
        if reason:
            refused[arm.name] = reason
    ends = {name: curve.end for name, curve in curves.items()}
    horizon = ends[reference.name] if reference else max(ends.values(), default=0.0)
    finals = {}
    for arm in scored:
        # an arm that is compared with nothing is shown as far as it got
        until = ends[arm.name] if reference is None or arm.name in refused else horizon
        finals[arm.name] = _final_of(curves[arm.name], until)
    compared = [arm for arm in scored if arm.name not in refused] if reference else []
    found = {arm.name: tuple(_speedups(arm, reference)) for arm in compared if reference}
    # an ablation of single runs would show nothing but that runs differ
    ablations = find_ablations([arm for arm in ordered if arm.curve and not arm.is_single])
    pairs = []
    for arm, other in _pairs(compared, base, ablations):
        if not _why_not(arm, other):
            pairs.append(_compare(arm, other))
    return Analysis(
        arms=ordered,
        baseline=base,
        metric=metric,
        horizon=horizon,
        speedups=found,
        finals=finals,
        costs={arm.name: cost_of(arm.runs) for arm in ordered if arm.runs},
        ablations=ablations,
        pairs=tuple(pairs),
        refused=refused,
    )


def _why_not(arm: Arm, other: Arm) -> str:
    """Return why two arms that have scores are not compared; empty if they are."""
    reason = refusal(arm, other)
    if reason:
        return reason
    end = _shared_end(arm, other)
    if end is None:
        return "their evaluations have no time in common"
    if end <= 0:
        return "both have scores only at the start"
    return ""


def _shared_end(arm: Arm, other: Arm) -> float | None:
    """Return the last nominal second at which both arms have a mean score; None if there is none."""
    if arm.curve is None or other.curve is None:
        return None
    end = min(arm.curve.end, other.curve.end)
    times = np.unique(np.concatenate([arm.curve.due, other.curve.due]))
    for due in reversed(times[times <= end * (1 + 1e-9)].tolist()):
        means = [mean_curve(curve.at(due)[0][:, None])[0] for curve in (arm.curve, other.curve)]
        if not np.isnan(means).any():
            return float(due)
    return None


def _compare(arm: Arm, other: Arm) -> Pair:
    """Compare two arms at the last time at which both have scores."""
    due = _shared_end(arm, other)
    assert due is not None  # checked by `_why_not`
    assert arm.curve
    assert other.curve
    scores, errors = arm.curve.at(due)
    other_scores, other_errors = other.curve.at(due)
    order = same_seeds(arm, other)
    paired = False
    if order is not None:
        other_scores = other_scores[order]
        other_errors = other_errors[order]
        paired = bool((np.isnan(scores) == np.isnan(other_scores)).all())
    known = ~np.isnan(scores)
    other_known = ~np.isnan(other_scores)
    scores = scores[known]
    other_scores = other_scores[other_known]
    gap = difference(
        scores,
        other_scores,
        float(error_of_mean(errors[known][:, None])[0]),
        float(error_of_mean(other_errors[other_known][:, None])[0]),
        paired=paired,
    )
    return Pair(
        arm=arm,
        other=other,
        due=due,
        score=float(scores.mean()),
        other_score=float(other_scores.mean()),
        runs=len(scores),
        other_runs=len(other_scores),
        difference=gap,
        speedup=next(_speedups(arm, other)),
    )


def _speedups(arm: Arm, other: Arm) -> Iterator[Speedup]:
    """Yield the speedups of an arm to the level of another, with intervals unless it is the same arm."""
    assert arm.curve
    assert other.curve
    theirs = other.curve.evaluations
    order = same_seeds(arm, other)
    if order is not None:
        theirs = Evaluations(theirs.scores[order], theirs.seconds[order], theirs.errors[order], theirs.due)  # type: ignore[index]
    return speedups(theirs, arm.curve.evaluations, paired=order is not None, intervals=arm is not other)


def _find_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """Return the arm of that name; None for no name (or ``none``), and for a single arm of another name."""
    by_name = {arm.name: arm for arm in arms}
    if name in by_name:
        return by_name[name]
    if name is None or name == "none" or len(by_name) == 1:
        return None
    names = f"{', '.join(map(plain, by_name))}.{suggest(name, by_name)}"
    raise UserError(f"No arm is called {name!r}: the arms are {names} Name one with --baseline, or 'none'.")


def _pairs(arms: Sequence[Arm], base: Arm | None, ablations: Sequence[Ablation]) -> list[tuple[Arm, Arm]]:
    """Return the pairs that the experiment is about, none without a baseline.

    The first is its subject against the baseline: the arm that the ablations vary, else the first that drops
    rollouts, else the first. Then all others against the baseline, and the subject against them. With few arms,
    every pair is compared.
    """
    others = [arm for arm in arms if arm is not base]
    if base is None or base not in arms or not others:
        return []
    subjects = [ablation.reference for ablation in ablations]
    subjects += [arm for arm in others if (sizes := rollouts_of(arm.config)) and sizes[0] != sizes[1]]
    subject = next((arm for arm in subjects if arm is not base), others[0])
    others = [subject, *(arm for arm in others if arm is not subject)]
    pairs = [(arm, base) for arm in others] + [(subject, arm) for arm in others[1:]]
    rest = itertools.combinations(others[1:], 2) if len(arms) <= _EVERY_PAIR else ()
    return [*pairs, *rest]


def _final_of(curve: Curve, horizon: float) -> Final:
    """Return the scores at the first checkpoint, at the last one within the horizon, and at the peak until then.

    A curve that begins after the horizon is shown at its end.
    """
    at = curve.last(horizon)
    if at is None:
        at = curve.last()
    assert at is not None  # the curve has a mean somewhere
    low, high = t_band(curve.scores, curve.errors)
    known = np.flatnonzero(~np.isnan(curve.mean))
    start = int(known[0])
    within = known[known <= at]
    peak = int(within[np.argmax(curve.mean[within])])
    there = ~np.isnan(curve.scores[:, at])
    scores = curve.scores[there, at]
    errors = curve.errors[there, at]
    return Final(
        start=float(curve.mean[start]),
        final=float(curve.mean[at]),
        final_due=float(curve.due[at]),
        final_seconds=float(curve.times[at]),
        final_runs=len(scores),
        scores=scores,
        low=float(low[at]),
        high=float(high[at]),
        peak=float(curve.mean[peak]),
        peak_seconds=float(curve.times[peak]),
        error=float(np.linalg.norm(errors) / len(errors)),
    )


def cost_of(runs: Sequence[Run]) -> Cost:
    """Return steps, seconds a step and seconds by phase: the mean of each run, then the mean over runs."""

    def mean(values: Iterable[object]) -> float:
        known = [value for value in map(finite, values) if value is not None]
        return float(np.mean(known)) if known else math.nan

    logged = [[row for row in run.metrics if (finite(row.get("step")) or 0) > 0] for run in runs]
    logged = [rows for rows in logged if rows]
    last = [(float(rows[-1]["step"]), finite(rows[-1].get("seconds"))) for rows in logged]
    phases = {
        phase: mean(mean(row.get(f"pods/seconds/{phase}") for row in rows) for rows in logged) for phase in PHASES
    }
    per_step = mean(clock and clock / step for step, clock in last)
    other = max(per_step - float(np.nansum([*phases.values()])), 0.0)
    return Cost(mean(step for step, _ in last), per_step, phases, other)


# ------------------------------------------------------------------------------------------ ablations


def find_ablations(arms: Sequence[Arm]) -> tuple[Ablation, ...]:
    """Return the families through one reference arm: the one from which most others differ in a single setting.

    Of several such arms one that drops rollouts comes first, then the order given. A family needs two arms, and
    three if it is all there is: the rest of the report compares two arms already.
    """
    settings = {arm: own for arm in arms if (own := settings_of(arm.config))}

    def family(arm: Arm, axis: str) -> list[Arm]:
        """Return the arms that differ in exactly this setting."""
        return [other for other in settings if _differences(settings[arm], settings[other]) == {axis}]

    def rank(arm: Arm) -> tuple[int, bool]:
        return sum(len(family(arm, axis)) for axis in AXES), not _is_plain(settings[arm])

    found: list[Ablation] = []
    for axis in AXES if settings else ():
        reference = max(settings, key=rank)
        members = [reference, *family(reference, axis)]
        if len(members) > 2 or (len(members) == 2 and len(arms) > 2):
            if axis in ("n", "m"):
                members.sort(key=lambda arm: settings[arm][axis])
            grpo = {arm: " (GRPO)" * _is_plain(settings[arm]) for arm in members}
            values = (plain(settings[arm][axis], limit=30) + grpo[arm] for arm in members)
            found.append(Ablation(axis, reference, tuple(members), tuple(values)))
    return tuple(found)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides what an arm learns, from a resolved recipe or a CSV's columns; empty if n or m is unknown.

    >>> settings_of({"num_generations": 16, "rule": "random", "seed": 3})
    {'n': 16, 'm': 16, 'rule': 'random', 'advantages': ''}
    """
    n, m = rollouts_of(config)
    if not n or not m:
        return {}
    skipped = OWN_TO_A_RUN | NO_MATTER | {"num_rollouts", "num_generations", *AXES, *_ROWS}
    axes = {"n": n, "m": m, "rule": str(config.get("rule") or ""), "advantages": str(config.get("advantages") or "")}
    rest = {f"{key}": in_order(value) for key, value in config.items() if key not in skipped and value is not None}
    rows, micro_batches = (finite(config.get(key)) for key in _ROWS)
    # rows follow m, so an ablation of m keeps the prompts of a step
    return rest | ({"prompts": rows * (micro_batches or 1) / m} if rows else {}) | axes


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether an arm is plain GRPO: it keeps all it generates, so rule and advantages change nothing."""
    return bool(settings["n"] == settings["m"])


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the settings in which two arms differ."""
    free = {"rule", "advantages"} if _is_plain(one) or _is_plain(other) else set()
    return {key for key in {*one, *other} - free if one.get(key) != other.get(key)}
