"""The figures of an analysis, each drawn for a wide page and for a phone."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from .analysis import PHASES, Analysis
from .arms import Arm, finite
from .figures import (
    NARROW,
    WIDE,
    Bar,
    Line,
    Series,
    curves_figure,
    phases_figure,
    steps_figure,
    threshold_figure,
    to_bytes,
)
from .statistics import Array
from .text import duration, interval, number, unit_for
from .wording import words

STEP_METRICS = {
    "reward": "reward, all n rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward within the kept",
    "pods/zero_variance_share": "share of groups with equal rewards",
}


@dataclass(frozen=True)
class Image:
    """An SVG for wide pages and one for narrow ones, as data URIs."""

    wide: str
    narrow: str
    alt: str


def pictures(analysis: Analysis) -> dict[str, Image]:
    """The figures there is data for, by the name of their place in the page."""
    makers: dict[str, Callable[[Analysis, float], Figure | None]] = {
        "curves": draw_curves,
        "threshold": _draw_threshold,
        "phases": _draw_phases,
        "steps": _draw_steps,
    }
    alts = {
        "curves": f"{words(analysis.metric)} against training time, every run and the mean of each arm",
        "threshold": "training time to the baseline’s level, for each arm",
        "phases": "seconds of a step by phase, for each arm",
        "steps": "reward, kept reward, its spread and the share of groups with equal rewards, over the steps",
    }
    images = {}
    for name, make in makers.items():
        wide, narrow = make(analysis, WIDE), make(analysis, NARROW)
        if wide and narrow:
            images[name] = Image(_uri(wide), _uri(narrow), alts[name])
    return images


def _uri(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(to_bytes(figure, "svg")).decode("ascii")


def draw_curves(analysis: Analysis, width: float = WIDE) -> Figure:
    """The main figure; empty axes before the first evaluation."""
    lines = []
    for arm in analysis.arms:
        result = analysis.speedup_of(arm.name)
        if arm.curve:
            crossing = result.arm_time if result else math.inf
            is_baseline = arm is analysis.baseline
            lines.append(Line(arm.label, arm.curve.seconds, arm.curve.scores, is_baseline, crossing))
    base = analysis.baseline
    result = analysis.speedup_of(base.name) if base else None
    if base is None or result is None:
        return curves_figure(lines, metric=words(analysis.metric), width=width)
    return curves_figure(
        lines,
        metric=words(analysis.metric),
        threshold=result.threshold,
        threshold_label=(f"99 % of {base.label}’s peak: " if width == WIDE else "") + number(result.threshold),
        width=width,
    )


def _draw_threshold(analysis: Analysis, width: float) -> Figure | None:
    bars = []
    unit = unit_for(analysis.horizon)
    for arm in analysis.arms:
        result = analysis.speedup_of(arm.name)
        if result is None:
            continue
        spread = interval(result.ci_low, result.ci_high)
        text = duration(result.arm_time, unit) if math.isfinite(result.arm_time) else "never reached"
        if arm is not analysis.baseline and result.speedup > 0:
            text += f"  {number(result.speedup, 2)}x" + ("" if spread == "–" else f" {spread}")
        bars.append(Bar(arm.label, result.arm_time, text, arm is analysis.baseline))
    if len(bars) < 2 or analysis.baseline is None:
        return None
    title = f"training time to 99 % of {analysis.baseline.label}’s peak" if width == WIDE else "to 99 % of peak"
    return threshold_figure(bars, horizon=analysis.horizon, title=title, width=width)


def _draw_phases(analysis: Analysis, width: float) -> Figure | None:
    shown = [(arm.label, analysis.costs[arm.name]) for arm in analysis.arms if arm.name in analysis.costs]
    shown = [(label, cost) for label, cost in shown if not math.isnan(cost.seconds_per_step)]
    if not shown:
        return None
    seconds_AK = np.array([[*cost.phases.values(), cost.other] for _, cost in shown])
    return phases_figure([label for label, _ in shown], [*PHASES, "other"], seconds_AK, width=width)


def _draw_steps(analysis: Analysis, width: float) -> Figure | None:
    series = [Series(arm.label, _step_values(arm), arm is analysis.baseline) for arm in analysis.arms]
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
