"""What the runs say: speedups, final scores, seconds by phase, and what must be said beside them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UserError
from ..runs import Run
from .ablations import Ablation, find_ablations
from .arms import Arm
from .curves import Curve, finite
from .resampling import Speedup, compare, evaluation_error, resampled
from .statistics import Criterion, bootstrap_band, normal_band
from .text import plain
from .wording import headlines, notes

PHASES = ("rollout", "reward", "selection", "update")
_CRITERIA: tuple[Criterion, ...] = ("p99", "peak")


@dataclass(frozen=True)
class Final:
    """An arm's scores at the ends of its curve; NaN intervals with one run."""

    start: float
    final: float
    final_seconds: float
    final_runs: int
    low: float  # 1.96 standard errors, as the paper's band
    high: float
    bootstrap_low: float
    bootstrap_high: float
    peak: float
    peak_seconds: float
    error: float = math.nan  # of the final score, from the evaluations' own standard errors


@dataclass(frozen=True)
class Cost:
    """Mean seconds of a step over the runs of an arm, in all and by phase; NaN where it was not logged."""

    steps: float
    seconds_per_step: float
    phases: dict[str, float]

    @property
    def other(self) -> float:
        """What no phase accounts for: data loading, logging, saving."""
        known = sum(value for value in self.phases.values() if not math.isnan(value))
        return max(self.seconds_per_step - known, 0.0)


@dataclass(frozen=True, eq=False)
class Analysis:
    """All that the figures, tables and pages are made from."""

    arms: tuple[Arm, ...]  # the baseline first
    baseline: Arm | None
    metric: str
    horizon: float  # nominal seconds at which final scores are compared
    speedups: dict[tuple[str, str, bool], Speedup]
    finals: dict[str, Final]
    costs: dict[str, Cost]
    headlines: tuple[str, ...]
    notes: tuple[str, ...]
    resamples: int
    seed: int
    ablations: tuple[Ablation, ...] = ()
    attempts: int = 0  # runs that were made again, and are in no figure

    def speedup_of(self, arm: str, criterion: str = "p99", interpolated: bool = False) -> Speedup | None:
        return self.speedups.get((arm, criterion, interpolated))


def analyse(
    arms: Sequence[Arm],
    *,
    baseline: str | None,
    metric: str,
    resamples: int = 2000,
    seed: int = 0,
    attempts: int = 0,
) -> Analysis:
    """Compare arms.

    Args:
        arms: at least one; arms without an evaluation are kept, and shown without numbers.
        baseline: name of the arm that the others are measured against, or None for no comparison.
        metric: name of the score, for sentences.
        resamples: bootstrap resamples of the runs.
        seed: of the bootstrap.
        attempts: runs that failed or were stopped and made again, to be said.

    Raises:
        UserError: when none of several arms has the baseline's name. A single arm needs no baseline.
    """
    base = find_baseline(arms, baseline)
    ordered = tuple(sorted(arms, key=lambda arm: arm is not base))
    curved = [(arm, arm.curve) for arm in ordered if arm.curve and arm.curve.has_mean]
    reference = base.curve if base and base.curve and base.curve.has_mean else None
    speedups = _speedups(reference, base, curved, resamples=resamples, seed=seed) if reference else {}
    ends = [float(curve.due[curve.last()]) for curve in ([reference] if reference else [c for _, c in curved])]
    horizon = min(ends, default=0.0)
    finals = {arm.name: final_of(curve, horizon, resamples=resamples, seed=seed) for arm, curve in curved}
    draft = Analysis(
        arms=ordered,
        baseline=base,
        metric=metric,
        horizon=horizon,
        speedups=speedups,
        finals=finals,
        costs={arm.name: cost_of(arm.runs) for arm in ordered if arm.runs},
        headlines=(),
        notes=(),
        resamples=resamples,
        seed=seed,
        # of single runs nothing can be said but that they differ
        ablations=find_ablations([arm for arm in ordered if arm.curve and len(arm.curve.runs) > 1]),
        attempts=attempts,
    )
    return replace(draft, headlines=headlines(draft), notes=notes(draft))


def find_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """The arm of that name; None for no name (or ``none``), and for a lone arm of another name."""
    by_name = {arm.name: arm for arm in arms}
    if name is None or (name == "none" and name not in by_name) or (len(by_name) == 1 and name not in by_name):
        return None
    if name not in by_name:
        names = ", ".join(plain(other) for other in by_name)
        close = difflib.get_close_matches(name, by_name, n=1)
        hint = f" Did you mean {plain(close[0])!r}?" if close else ""
        raise UserError(
            f"No arm is called {name!r}: the arms are {names}.{hint} "
            "Name one with --baseline, or 'none' for no comparison."
        )
    return by_name[name]


def _speedups(
    base: Curve, base_arm: Arm | None, curved: Sequence[tuple[Arm, Curve]], *, resamples: int, seed: int
) -> dict[tuple[str, str, bool], Speedup]:
    """Of every arm, by both criteria, with and without interpolation; the resamples of the baseline are the same."""
    random = np.random.default_rng(seed)
    settings: dict[str, Any] = {"random": random, "seed": seed}
    base_drawn = resampled(base.scores, base.seconds, base.errors, resamples=resamples, **settings)
    after_the_baseline = random.bit_generator.state
    found: dict[tuple[str, str, bool], Speedup] = {}
    for arm, curve in curved:
        random.bit_generator.state = after_the_baseline
        draws = 0 if arm is base_arm else resamples  # against itself an interval means nothing
        drawn = resampled(curve.scores, curve.seconds, curve.errors, resamples=draws, **settings)
        for criterion in _CRITERIA:
            for interpolated in (False, True):
                result = compare(base_drawn, drawn, criterion, interpolated=interpolated)
                found[arm.name, criterion, interpolated] = result
    return found


def final_of(curve: Curve, horizon: float, *, resamples: int, seed: int) -> Final:
    """Scores at the first checkpoint, at the last one within the horizon, and at the peak."""
    at = curve.last(horizon)
    low, high = normal_band(curve.scores)
    boot_low, boot_high = bootstrap_band(curve.scores[:, [at]], resamples, seed)
    known = np.flatnonzero(~np.isnan(curve.mean))
    start = int(known[0])
    within = known[known <= at] if at >= start else known
    peak = int(within[np.argmax(curve.mean[within])])
    return Final(
        start=float(curve.mean[start]),
        final=float(curve.mean[at]),
        final_seconds=float(curve.times[at]),
        final_runs=int((~np.isnan(curve.scores[:, at])).sum()),
        low=float(low[at]),
        high=float(high[at]),
        bootstrap_low=float(boot_low[0]),
        bootstrap_high=float(boot_high[0]),
        peak=float(curve.mean[peak]),
        peak_seconds=float(curve.times[peak]),
        error=float(evaluation_error(curve.scores, curve.errors)[at]),
    )


def cost_of(runs: Sequence[Run]) -> Cost:
    """Steps, seconds a step and seconds by phase: the mean of each run, then the mean over runs."""
    steps, seconds = [], []
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for run in runs:
        rows = [(step, row) for row in run.metrics if (step := finite(row.get("step"))) and step > 0]
        if not rows:
            continue
        step, last = rows[-1]
        steps.append(step)
        clock = finite(last.get("seconds"))
        if clock is not None:
            seconds.append(clock / step)
        for phase in PHASES:
            key = f"pods/seconds/{phase}"
            logged = [value for _, row in rows if (value := finite(row.get(key))) is not None]
            if logged:
                phases[phase].append(float(np.mean(logged)))
    return Cost(_mean(steps), _mean(seconds), {phase: _mean(values) for phase, values in phases.items()})


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
