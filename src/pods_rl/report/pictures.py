"""The figures of an analysis, each drawn for a wide page, a phone and a file, with a note on how it was made."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from .ablations import AXES, Ablation
from .analysis import PHASES, Analysis
from .arms import Arm
from .captions import ablation_note, curves_note, phases_note, steps_note, threshold_note
from .curves import ACCURACIES, LENGTH, finite
from .figures import Bar, Final, Line, ablation_figure, curves_figure, phases_figure, threshold_figure
from .roles import bars_of, lines_of, roles_of
from .statistics import Array
from .step_figures import Series, steps_figure
from .style import NARROW, WIDE, Role, to_bytes
from .text import duration, interval, number, unit_for
from .wording import words

STEP_METRICS = {
    "reward": "reward, all n rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward within the kept",
    "pods/zero_variance_share": "share of groups with equal rewards",
}

FIGURES = ("curves", "threshold", "phases", "steps", *ACCURACIES, LENGTH, *(f"ablation-{axis}" for axis in AXES))
"""Every name a figure may have."""


@dataclass(frozen=True)
class Picture:
    """A figure as a PNG for a file, and as SVG for wide pages and narrow ones, as data URIs."""

    png: bytes
    wide: str
    narrow: str
    alt: str
    note: str


def pictures(analysis: Analysis) -> dict[str, Picture]:
    """The figures there is data for, by name (``FIGURES``); ``curves`` is always there."""
    metric = words(analysis.metric)
    made: dict[str, tuple[Callable[[float], Figure | None], str, str]] = {
        "curves": (
            partial(_draw_curves, analysis),
            f"{metric} against training time, for each arm",
            curves_note(analysis, analysis.metric),
        ),
        "threshold": (
            partial(_draw_threshold, analysis),
            "training time to the baseline’s level, for each arm",
            threshold_note(analysis),
        ),
        "phases": (
            partial(_draw_phases, analysis),
            "seconds of a step by phase, for each arm",
            phases_note(analysis),
        ),
        "steps": (
            partial(_draw_steps, analysis),
            ", ".join(title for name, title in STEP_METRICS.items() if _logged(analysis, name)) + ", over the steps",
            steps_note(analysis, {name for name in STEP_METRICS if _logged(analysis, name)}),
        ),
    }
    for name in (*ACCURACIES, LENGTH):
        if name != analysis.metric:
            alt = f"{words(name)} against training time, for each arm"
            made[name] = (partial(_draw_other, analysis, name), alt, curves_note(analysis, name))
    for ablation in analysis.ablations:
        made[f"ablation-{ablation.axis}"] = (
            partial(_draw_ablation, analysis, ablation),
            f"{metric} against training time and at the end, by {ablation.title}",
            ablation_note(analysis, ablation),
        )
    return {name: found for name, (draw, alt, note) in made.items() if (found := _picture(draw, alt, note))}


def _logged(analysis: Analysis, metric: str) -> bool:
    return any(finite(row.get(metric)) is not None for arm in analysis.arms for run in arm.runs for row in run.metrics)


def _picture(draw: Callable[[float], Figure | None], alt: str, note: str) -> Picture | None:
    wide, narrow = draw(WIDE), draw(NARROW)
    if wide is None or narrow is None:
        return None
    return Picture(to_bytes(wide, "png"), _uri(wide), _uri(narrow), alt, note)


def _uri(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(to_bytes(figure, "svg")).decode("ascii")


def _draw_curves(analysis: Analysis, width: float) -> Figure:
    """The main figure; empty axes before the first evaluation."""
    lines = lines_of(analysis, analysis.metric)
    base = analysis.baseline
    result = analysis.speedup_of(base.name) if base else None
    if base is None or result is None:
        return curves_figure(lines, metric=words(analysis.metric), width=width)
    whose = f"{base.label}’s peak" if width == WIDE else "peak"
    label = f"99 % of {whose}: {number(result.threshold)}"
    settings = {"threshold": result.threshold, "threshold_label": label, "width": width}
    return curves_figure(lines, metric=words(analysis.metric), **settings)


def _draw_other(analysis: Analysis, metric: str, width: float) -> Figure | None:
    lines = lines_of(analysis, metric)
    return curves_figure(lines, metric=words(metric), width=width) if lines else None


def _draw_ablation(analysis: Analysis, ablation: Ablation, width: float) -> Figure | None:
    lines, finals = [], []
    for arm, value in zip(ablation.arms, ablation.values, strict=True):
        final = analysis.finals.get(arm.name)
        if not arm.curve or not final:
            continue
        role: Role = "reference" if arm is ablation.reference else "baseline" if arm is analysis.baseline else "arm"
        lines.append(Line(ablation.label(value), arm.curve.seconds, arm.curve.scores, role))
        runs = arm.curve.scores[:, arm.curve.last(analysis.horizon)]
        finals.append(Final(value, final.final, final.low, final.high, runs[~np.isnan(runs)], role))
    return ablation_figure(lines, finals, metric=words(analysis.metric), width=width) if len(lines) > 1 else None


def _draw_threshold(analysis: Analysis, width: float) -> Figure | None:
    bars = []
    roles = roles_of(analysis)
    unit = unit_for(analysis.horizon)
    for arm in bars_of(analysis):
        result = analysis.speedup_of(arm.name)
        if result is None:
            continue
        spread = interval(result.ci_low, result.ci_high)
        text = duration(result.arm_time, unit) if math.isfinite(result.arm_time) else "never reached"
        if arm is not analysis.baseline and result.speedup > 0:
            text += f"  {number(result.speedup, 2)}x" + ("" if spread == "–" else f" {spread}")
            text += "" if result.settled else ", not settled"
        bars.append(Bar(arm.label, result.arm_time, text, roles[arm.name]))
    if len(bars) < 2 or analysis.baseline is None:
        return None
    title = f"training time to 99 % of {analysis.baseline.label}’s peak" if width == WIDE else "to 99 % of peak"
    return threshold_figure(bars, horizon=analysis.horizon, title=title, width=width)


def _draw_phases(analysis: Analysis, width: float) -> Figure | None:
    shown = [(arm.label, analysis.costs[arm.name]) for arm in bars_of(analysis) if arm.name in analysis.costs]
    shown = [(label, cost) for label, cost in shown if not math.isnan(cost.seconds_per_step)]
    if not shown:
        return None
    seconds_AK = np.array([[*cost.phases.values(), cost.other] for _, cost in shown])
    return phases_figure([label for label, _ in shown], [*PHASES, "other"], seconds_AK, width=width)


def _draw_steps(analysis: Analysis, width: float) -> Figure | None:
    roles = roles_of(analysis)
    shown = [arm for arm in analysis.arms if roles[arm.name] != "other"]
    series = [Series(arm.label, _step_values(arm), roles[arm.name]) for arm in shown]
    return steps_figure(series, STEP_METRICS, width=width) if any(arm.values for arm in series) else None


def _step_values(arm: Arm) -> dict[str, list[tuple[Array, Array]]]:
    found: dict[str, list[tuple[Array, Array]]] = {}
    for metric in STEP_METRICS:
        for run in arm.runs:
            points = [(finite(row.get("step")), finite(row.get(metric))) for row in run.metrics]
            known = np.array([point for point in points if None not in point], dtype=np.float64)
            if len(known):
                found.setdefault(metric, []).append((known[:, 0], known[:, 1]))
    return found
