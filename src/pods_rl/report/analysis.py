"""The numbers of a report: final scores, pairs of arms, speedups, ablations, and seconds by phase."""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError
from ..runs import Run
from .arms import OWN_TO_A_RUN, Arm, Curve, rollouts_of
from .statistics import Array, Difference, Speedup, difference, evaluation_error, normal_band, speedups
from .text import finite, plain

PHASES = ("rollout", "reward", "selection", "update")
AXES = {
    "n": "rollouts generated (n)",
    "m": "rollouts kept (m)",
    "rule": "selection rule",
    "advantages": "advantages",
}
"""What an ablation varies."""

_EVERY_PAIR = 4  # with up to this many arms every pair is compared
# rows follow m, so an ablation of m keeps the prompts of a step: they are compared instead
_ROW_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
# these decide how memory and disk are used, not what is learned
_NO_MATTER = {"rollout_batch_size", "vllm_gpu_memory_utilization", "eval_batch_size", "ledger_every", "report_to"}


@dataclass(frozen=True)
class Final:
    """An arm's scores at the ends of its curve; NaN intervals with one run."""

    start: float
    final: float
    final_seconds: float
    final_runs: int
    low: float  # 1.96 standard errors, as the paper's band
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

    @property
    def other(self) -> float:
        """The time outside all phases: data loading, logging, saving."""
        return max(self.seconds_per_step - float(np.nansum([*self.phases.values()])), 0.0)


@dataclass(frozen=True, eq=False)
class Pair:
    """An arm against another: its final score minus the other's, and its speedup to the other's level."""

    arm: Arm
    other: Arm
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
    horizon: float  # nominal seconds at which final scores are compared
    speedups: dict[tuple[str, str, bool], Speedup]
    finals: dict[str, Final]
    costs: dict[str, Cost]
    ablations: tuple[Ablation, ...]
    pairs: tuple[Pair, ...]  # the one that the experiment is about first
    resamples: int
    seed: int

    def speedup_of(self, arm: str) -> Speedup | None:
        """Return the speedup against the baseline by the authors' rule."""
        return self.speedups.get((arm, "p99", False))

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]


def analyse(
    arms: Sequence[Arm],
    *,
    baseline: str | None,
    metric: str,
    resamples: int = 2000,
    seed: int = 0,
) -> Analysis:
    """Compare arms; one without an evaluation is kept, and shown without numbers.

    Args:
        baseline: name of the arm that the others are measured against, or None for no comparison.
        metric: name of the score, for sentences.
        resamples: bootstrap resamples of the runs.
        seed: of the bootstrap.

    Raises:
        UserError: when none of several arms has the baseline's name. A single arm needs no baseline.
    """
    base = _find_baseline(arms, baseline)
    ordered = tuple(sorted(arms, key=lambda arm: arm is not base))
    curves = {arm.name: arm.curve for arm in ordered if arm.curve and arm.curve.has_mean}
    reference = curves.get(base.name) if base else None
    ends = [float(curve.due[curve.last()]) for curve in ([reference] if reference else curves.values())]
    horizon = min(ends, default=0.0)
    found: dict[tuple[str, str, bool], Speedup] = {}
    for name, curve in curves.items():
        if not reference:
            break
        draws = 0 if curve is reference else resamples  # against itself an interval means nothing
        for result in speedups(reference.tables, curve.tables, resamples=draws, seed=seed):
            found[name, result.criterion, result.interpolated] = result
    # an ablation of single runs would show nothing but that runs differ
    ablations = find_ablations([arm for arm in ordered if arm.curve and not arm.is_single])
    finals = {name: _final_of(curve, horizon) for name, curve in curves.items()}
    pairs = []
    for arm, other in _pairs([arm for arm in ordered if arm.name in curves], base, ablations):
        ours, theirs = (_runs_at(curves[one.name], horizon) for one in (arm, other))
        gap = difference(ours, theirs, finals[arm.name].error, finals[other.name].error)
        known = found.get((arm.name, "p99", False)) if other is base else None
        tables = (curves[one.name].tables for one in (other, arm))
        pairs.append(Pair(arm, other, gap, known or next(speedups(*tables, resamples=resamples, seed=seed))))
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
        resamples=resamples,
        seed=seed,
    )


def _find_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """Return the arm of that name; None for no name (or ``none``), and for a single arm of another name."""
    by_name = {arm.name: arm for arm in arms}
    if name in by_name:
        return by_name[name]
    if name is None or name == "none" or len(by_name) == 1:
        return None
    close = difflib.get_close_matches(name, by_name, n=1)
    hint = f" Did you mean {plain(close[0])!r}?" if close else ""
    raise UserError(
        f"No arm is called {name!r}: the arms are {', '.join(plain(other) for other in by_name)}.{hint} "
        "Name one with --baseline, or 'none' for no comparison."
    )


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


def _runs_at(curve: Curve, horizon: float) -> Array:
    """Return the final score of each run that has one."""
    scores = curve.scores[:, curve.last(horizon)]
    return np.asarray(scores[~np.isnan(scores)])


def _final_of(curve: Curve, horizon: float) -> Final:
    """Return the scores at the first checkpoint, at the last one within the horizon, and at the peak."""
    at = curve.last(horizon)
    low, high = normal_band(curve.scores)
    known = np.flatnonzero(~np.isnan(curve.mean))
    start = int(known[0])
    within = known[known <= at] if at >= start else known
    peak = int(within[np.argmax(curve.mean[within])])
    return Final(
        start=float(curve.mean[start]),
        final=float(curve.mean[at]),
        final_seconds=float(curve.times[at]),
        final_runs=len(_runs_at(curve, horizon)),
        low=float(low[at]),
        high=float(high[at]),
        peak=float(curve.mean[peak]),
        peak_seconds=float(curve.times[peak]),
        error=float(evaluation_error(curve.scores, curve.errors)[at]),
    )


def cost_of(runs: Sequence[Run]) -> Cost:
    """Return steps, seconds a step and seconds by phase: the mean of each run, then the mean over runs."""
    logged: dict[str, list[float]] = {key: [] for key in ("steps", "seconds", *PHASES)}
    for run in runs:
        rows = [(step, row) for row in run.metrics if (step := finite(row.get("step"))) and step > 0]
        if not rows:
            continue
        step, last = rows[-1]
        logged["steps"].append(step)
        if (clock := finite(last.get("seconds"))) is not None:
            logged["seconds"].append(clock / step)
        for phase in PHASES:
            values = [value for _, row in rows if (value := finite(row.get(f"pods/seconds/{phase}"))) is not None]
            logged[phase] += [float(np.mean(values))] if values else []
    means = {key: float(np.mean(values)) if values else math.nan for key, values in logged.items()}
    return Cost(means["steps"], means["seconds"], {phase: means[phase] for phase in PHASES})


# ------------------------------------------------------------------------------------------ ablations


def find_ablations(arms: Sequence[Arm]) -> tuple[Ablation, ...]:
    """Return the families through one reference arm: the one from which most others differ in a single setting.

    Of several such arms one that drops rollouts comes first, then the order given. A family needs two arms, and
    three if it is all there is: the rest of the report compares two arms already.
    """
    known = [(arm, settings) for arm in arms if (settings := settings_of(arm.config))]
    if not known:
        return ()

    def neighbours(own: Mapping[str, Any]) -> dict[str, list[tuple[Arm, Mapping[str, Any]]]]:
        """Return the arms that differ in exactly one setting, by that setting."""
        return {axis: [pair for pair in known if _differences(own, pair[1]) == {axis}] for axis in AXES}

    def rank(pair: tuple[Arm, Mapping[str, Any]]) -> tuple[int, bool]:
        return sum(map(len, neighbours(pair[1]).values())), not _is_plain(pair[1])

    reference, own = max(known, key=rank)
    found = []
    for axis, others in neighbours(own).items():
        if others and (len(others) > 1 or len(arms) > 2):
            family = [(reference, own), *others]
            if axis in ("n", "m"):
                family.sort(key=lambda pair: pair[1][axis])
            values = (plain(one[axis], limit=30) + " (GRPO)" * _is_plain(one) for _, one in family)
            found.append(Ablation(axis, reference, tuple(arm for arm, _ in family), tuple(values)))
    return tuple(found)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides what an arm learns, from a resolved recipe or a CSV's columns; empty if n or m is unknown.

    >>> settings_of({"num_generations": 16, "rule": "random", "seed": 3})
    {'n': 16, 'm': 16, 'rule': 'random', 'advantages': ''}
    """
    n, m = rollouts_of(config)
    if not n or not m:
        return {}
    skipped = OWN_TO_A_RUN | _NO_MATTER | {"num_rollouts", "num_generations", *AXES, *_ROW_KEYS}
    axes = {"n": n, "m": m, "rule": str(config.get("rule") or ""), "advantages": str(config.get("advantages") or "")}
    rest = {f"{key}": in_order(value) for key, value in config.items() if key not in skipped and value is not None}
    rows, micro, steps, generated = (finite(config.get(key)) for key in _ROW_KEYS)
    shares = {"rows": rows and rows * (micro or 1.0) / m, "updates": steps and steps / (micro or 1.0)}
    shares["generated"] = generated and generated / m
    return rest | {f"prompts: {key}": share for key, share in shares.items() if share is not None} | axes


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether an arm is plain GRPO: it keeps all it generates, so rule and advantages change nothing."""
    return bool(settings["n"] == settings["m"])


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the settings in which two arms differ."""
    free = {"rule", "advantages"} if _is_plain(one) or _is_plain(other) else set()
    return {key for key in {*one, *other} - free if one.get(key) != other.get(key)}


def in_order(value: Any) -> str:
    """Return a setting as JSON with sorted keys; a value that JSON cannot hold as Python writes it."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
