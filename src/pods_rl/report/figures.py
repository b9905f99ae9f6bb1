"""The figures of an analysis: which arms each draws, and a caption of what is drawn."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from .ablations import AXES, Ablation, setting_of
from .analysis import PHASES, Analysis
from .arms import Arm
from .curves import ACCURACIES, LENGTH, finite
from .line_plots import Line, Point, ablation_figure, curves_figure, describe_lines, describe_others
from .plots import (
    CROWD,
    MOST_BARS,
    NARROW,
    WIDE,
    Bar,
    Role,
    Series,
    phases_figure,
    steps_figure,
    threshold_figure,
    to_bytes,
)
from .statistics import Array
from .text import duration, interval, names, number, unit_for, words

STEP_METRICS = {
    "reward": "reward, all generated rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward, kept rollouts",
    "pods/zero_variance_share": "share of groups with equal rewards",
    "pods/waves/rollouts": "rollouts generated of a prompt, with waves",
    "tools/call_frequency": "tool calls of a rollout",
    "tools/failure_frequency": "share of tool calls that failed",
}

FIGURES = ("curves", "threshold", "phases", "steps", *ACCURACIES, LENGTH, *(f"ablation-{axis}" for axis in AXES))
"""Every name a figure may have."""


class Sketch(NamedTuple):
    """A figure to draw at a width in inches, its alternative text, and its caption."""

    draw: Callable[[float], Figure]
    alt: str
    note: str


@dataclass(frozen=True)
class Picture:
    """A figure as a PNG for a file, and as data URIs: SVG for wide pages and narrow ones, PDF to save."""

    png: bytes
    wide: str
    narrow: str
    pdf: str
    alt: str
    note: str


def pictures(analysis: Analysis) -> dict[str, Picture]:
    """Return the figures that have data, by name (``FIGURES``); ``curves`` is always included."""
    return {name: _picture(sketch) for name, sketch in sketches(analysis).items()}


def sketches(analysis: Analysis) -> dict[str, Sketch]:
    """Return what to draw, by name."""
    found: dict[str, Sketch | None] = {
        "curves": sketch_curves(analysis, analysis.metric),
        "threshold": sketch_threshold(analysis),
        "phases": _sketch_phases(analysis),
        "steps": _sketch_steps(analysis),
    }
    for name in (*ACCURACIES, LENGTH):
        if name != analysis.metric and lines_of(analysis, name):
            found[name] = sketch_curves(analysis, name)
    for ablation in analysis.ablations:
        found[f"ablation-{ablation.axis}"] = _sketch_ablation(analysis, ablation)
    return {name: sketch for name, sketch in found.items() if sketch}


def _picture(sketch: Sketch) -> Picture:
    wide, narrow = sketch.draw(WIDE), sketch.draw(NARROW)
    pdf = _uri(to_bytes(wide, "pdf"), "application/pdf")
    wide_svg, narrow_svg = (_uri(to_bytes(figure, "svg"), "image/svg+xml") for figure in (wide, narrow))
    return Picture(to_bytes(wide, "png"), wide_svg, narrow_svg, pdf, sketch.alt, sketch.note)


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


# ---------------------------------------------------------------------------------- which arms, and how


def roles_of(analysis: Analysis) -> dict[str, Role]:
    """Return the role of each arm, by name.

    Up to ``CROWD`` arms are all named. Of more, five are, the others are grey: the baseline, the arm that the
    ablations vary, two of plain GRPO, the one that reaches the level soonest and the one that ends highest (so that
    the best are never grey), then others in their order.
    """
    reference = analysis.ablations[0].reference if analysis.ablations else None
    settings = [(arm, setting_of(arm.config)) for arm in analysis.arms]
    plain_arms = [arm for arm, setting in settings if setting and setting.is_plain][:2]
    named = [analysis.baseline, reference, *plain_arms, *_best(analysis), *analysis.arms]
    curved = [arm for arm in dict.fromkeys(named) if arm and arm.curve]
    shown = {arm.name for arm in (curved if len(curved) <= CROWD else curved[: CROWD - 1])}

    roles: dict[str, Role] = {}
    for arm in analysis.arms:
        roles[arm.name] = "other" if arm.curve and arm.name not in shown else "reference" if arm is reference else "arm"
    return roles | ({analysis.baseline.name: "baseline"} if analysis.baseline else {})


def _best(analysis: Analysis) -> list[Arm]:
    """The arm that reaches the level soonest, and the one that ends highest."""
    curved = [arm for arm in analysis.arms if arm.name in analysis.finals]
    compared = [(s.speedup, arm) for arm in curved
                if arm is not analysis.baseline and (s := analysis.speedup_of(arm.name))]  # fmt: skip
    best = [max(compared, key=lambda pair: pair[0])[1]] if compared else []
    return [*best, *([max(curved, key=lambda arm: analysis.finals[arm.name].final)] if curved else [])]


def lines_of(analysis: Analysis, metric: str) -> list[Line]:
    """Return the arms that a figure of a metric over training time draws."""
    lines = []
    roles = roles_of(analysis)
    for arm in analysis.arms:
        curve, result = arm.curves(analysis.metric).get(metric), analysis.speedup_of(arm.name)
        if curve:
            crossing = result.arm_time if result and metric == analysis.metric else math.inf
            clock = str(arm.config.get("clock", "wall"))
            lines.append(Line(arm.label, curve.seconds, curve.scores, roles[arm.name], crossing, curve.errors, clock))
    return lines


def _bars_of(analysis: Analysis) -> tuple[list[Arm], str]:
    """The arms that a figure of bars draws: all, or of very many the named ones, then others in their order; and a
    note on how many these are."""
    roles = roles_of(analysis)
    chosen = sorted(analysis.arms, key=lambda arm: roles[arm.name] == "other")[:MOST_BARS]
    every = len(analysis.arms)
    note = f" {len(chosen)} of {every} arms are drawn." if len(chosen) < every else ""
    return [arm for arm in analysis.arms if arm in chosen], note


# ----------------------------------------------------------------------------------- over training time


def sketch_curves(analysis: Analysis, metric: str) -> Sketch:
    """A metric over training time; empty axes before the first evaluation."""
    lines, base = lines_of(analysis, metric), analysis.baseline
    result = analysis.speedup_of(base.name) if base and metric == analysis.metric else None

    def draw(width: float) -> Figure:
        if base is None or result is None:
            return curves_figure(lines, metric=words(metric), width=width)
        label = f"99 % of {f'{base.label}’s peak' if width == WIDE else 'peak'}: {number(result.threshold)}"
        level = result.threshold
        return curves_figure(lines, metric=words(metric), threshold=level, threshold_label=label, width=width)

    named = [line for line in lines if line.role != "other"]
    note = describe_lines(named) + _interpolated(analysis)
    if result and any(math.isfinite(line.crossing) for line in named):
        what = "a line" if all(len(line.scores) == 1 for line in named) else "a mean"
        note += f" Dots: where {what} first reaches the dashed level."
    return Sketch(draw, f"{words(metric)} against training time, for each arm", note + describe_others(lines))


def _interpolated(analysis: Analysis) -> str:
    mixed = [arm.label for arm in analysis.arms if arm.curve and arm.curve.interpolated]
    return f" Interpolated to common times: {names(mixed)}." if mixed else ""


def _sketch_ablation(analysis: Analysis, ablation: Ablation) -> Sketch | None:
    lines, points = [], []
    for arm, value in zip(ablation.arms, ablation.values, strict=True):
        final = analysis.finals.get(arm.name)
        if not arm.curve or not final:
            continue
        role: Role = "reference" if arm is ablation.reference else "baseline" if arm is analysis.baseline else "arm"
        lines.append(Line(ablation.label(value), arm.curve.seconds, arm.curve.scores, role))
        runs = arm.curve.scores[:, arm.curve.last(analysis.horizon)]
        points.append(Point(value, final.final, final.low, final.high, runs[~np.isnan(runs)]))
    if len(lines) < 2:
        return None
    metric = words(analysis.metric)
    spread = " with the same interval" if any(not math.isnan(point.low) for point in points) else ""
    note = (
        f"All with {ablation.held}. {describe_lines(lines)}{_interpolated(analysis)} In the second panel the score at "
        f"{duration(analysis.horizon)} of training{spread}; faint dots are runs."
    )
    return Sketch(
        lambda width: ablation_figure(lines, points, metric=metric, width=width),
        f"{metric} against training time and at the end, by {ablation.title}",
        note,
    )


# ------------------------------------------------------------------------------------------ bars, steps


def sketch_threshold(analysis: Analysis) -> Sketch | None:
    """Training time to the baseline's level."""
    arms, drawn = _bars_of(analysis)
    results = [(arm, result) for arm in arms if (result := analysis.speedup_of(arm.name))]
    base, roles, unit = analysis.baseline, roles_of(analysis), unit_for(analysis.horizon)
    if len(results) < 2 or base is None:
        return None
    bars = []
    for arm, result in results:
        text = duration(result.arm_time, unit) if math.isfinite(result.arm_time) else "never reached"
        if arm is not base and result.speedup > 0:
            spread = f" {interval(result.ci_low, result.ci_high)}" if result.has_interval else ""
            text += f"  {number(result.speedup, 2)}x{spread}{'' if result.settled else ', not settled'}"
        bars.append(Bar(arm.label, result.arm_time, text, roles[arm.name]))

    def draw(width: float) -> Figure:
        title = f"training time to 99 % of {base.label}’s peak" if width == WIDE else "to 99 % of peak"
        return threshold_figure(bars, horizon=analysis.horizon, title=title, width=width)

    single = all(not arm.curve or arm.is_single for arm in analysis.arms)
    note = f"The first checkpoint at which {'an arm' if single else 'an arm’s mean'} reaches the level, and the speedup"
    note += " with its 95 % interval." if any(result.has_interval for _, result in results) else "."
    if any(result.never_reached > 0 for _, result in results):
        note += " In an interval, a resample that never reaches the level counts as 0."
    if any(math.isinf(result.arm_time) for _, result in results):
        note += " Hatched: never reached."
    return Sketch(draw, "training time to the baseline’s level, for each arm", note + drawn)


def _sketch_phases(analysis: Analysis) -> Sketch | None:
    arms, drawn = _bars_of(analysis)
    costs = [(arm.label, analysis.costs[arm.name]) for arm in arms if arm.name in analysis.costs]
    shown = [(label, cost) for label, cost in costs if not math.isnan(cost.seconds_per_step)]
    if not shown:
        return None
    labels, parts = [label for label, _ in shown], [*PHASES, "other"]
    seconds_AK = np.array([[*cost.phases.values(), cost.other] for _, cost in shown])
    runs = ", then over runs" if any(arm.run_count > 1 for arm in analysis.arms) else ""
    return Sketch(
        lambda width: phases_figure(labels, parts, seconds_AK, width=width),
        "seconds of a step by phase, for each arm",
        f"The mean over the steps of a run{runs}. Evaluation is not in the training clock.{drawn}",
    )


def _sketch_steps(analysis: Analysis) -> Sketch | None:
    roles = roles_of(analysis)
    shown = [arm for arm in analysis.arms if roles[arm.name] != "other"]
    series = [
        Series(arm.label, {key: found for key in STEP_METRICS if (found := step_values(arm, key))}, roles[arm.name])
        for arm in shown
    ]
    logged = [metric for metric in STEP_METRICS if any(metric in arm.values for arm in series)]
    if not logged:
        return None
    several = any(arm.run_count > 1 for arm in analysis.arms)
    note = "Means over the runs of an arm" if several else "Means"
    note += f" within equal intervals of steps{', as far as most of its runs got' if several else ''}."
    if "reward" in logged:
        note += " Reward is over all rollouts generated of a prompt."
    if any(name.startswith("pods/selected/") for name in logged):
        note += " Kept rollouts are the m that were trained on."
    undrawn = [arm.label for arm in analysis.arms if arm not in shown and arm.runs]
    note += f" Not drawn: {names(undrawn)}." if undrawn else ""
    alt = ", ".join(STEP_METRICS[name] for name in logged) + ", over the steps"
    return Sketch(lambda width: steps_figure(series, STEP_METRICS, width=width), alt, note)


def step_values(arm: Arm, metric: str) -> list[tuple[Array, Array]]:
    """Return the steps and the values of a logged metric, for each run that has it."""
    found = []
    for run in arm.runs:
        points = [(finite(row.get("step")), finite(row.get(metric))) for row in run.metrics]
        known = np.array([point for point in points if None not in point], dtype=np.float64)
        if len(known):
            found.append((known[:, 0], known[:, 1]))
    return found
