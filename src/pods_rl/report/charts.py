"""The lines of a report's figures as plain data: for the page's script, and for figures in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runs import Run
from .analysis import Analysis
from .arms import Arm, Curve, curve_of
from .intervals import Z_95, Array, t_band
from .text import UNITS, finite, rounded, unit_for, words

STEP_METRICS = {
    "reward": "reward, all generated rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward, kept rollouts",
    "pods/zero_variance_share": "share of groups with equal rewards",
    "tools/call_frequency": "tool calls of a rollout",
    "tools/failure_frequency": "share of tool calls that failed",
}

_MOST_RUNS = 20  # drawn of an arm, evenly chosen; means are over all
_MOST_POINTS = 300  # of a line; a longer curve keeps evenly spread ones
_BINS = 200  # points of a logged metric over steps
_CROWD = 6  # with more arms, bands and runs overlap

# Okabe and Ito's palette without its yellow, which is invisible on white; the baseline is grey
_BASELINE = "#5f6368"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 5), (2, 4))

Chart = dict[str, Any]
"""One panel: ``y`` (a name), ``x`` (a list of [key, label]), ``level`` ([value, label] or None), ``crowded`` (whether
runs and bands are hidden at first), and ``arms``, each with ``label``, ``colour``, ``dash``, ``crossing`` (time and
score of the checkpoint at which its mean reaches the level, or None) and, by key of x, ``lines``."""


class Style(NamedTuple):
    """A colour, and the lengths of dashes and gaps in points; none for a solid line."""

    colour: str
    dash: tuple[int, ...] = ()


def line_styles(count: int) -> list[Style]:
    """Return distinct styles for up to 21 arms.

    >>> [style.colour for style in line_styles(2)]
    ['#D55E00', '#0072B2']
    """
    styles = []
    for rank in range(count):
        rounds, colour = divmod(rank, len(_COLOURS))
        styles.append(Style(_COLOURS[colour], _DASHES[rounds % len(_DASHES)]))
    return styles


def styles_of(analysis: Analysis) -> dict[str, Style]:
    """Return the style of each arm by name, the same in every figure; the arm that the report is about comes first."""
    subject = analysis.pairs[0].arm if analysis.pairs else None
    coloured = [arm for arm in analysis.arms if arm is not analysis.baseline]
    coloured.sort(key=lambda arm: arm is not subject)
    styles = {arm.name: style for arm, style in zip(coloured, line_styles(len(coloured)), strict=True)}
    if analysis.baseline:
        styles[analysis.baseline.name] = Style(_BASELINE)
    return styles


def charts(analysis: Analysis) -> dict[str, list[Chart]]:
    """Return the panels of the page's figures: ``scores`` of evaluations, the compared one first, and ``steps``."""
    figures = {
        "scores": [chart_of(analysis, metric) for metric in analysis.metrics],
        "steps": [_step_chart(analysis, metric, title) for metric, title in STEP_METRICS.items()],
    }
    drawn = {}
    for name, panels in figures.items():
        panels = [panel for panel in panels if panel["arms"]]
        if panels:
            drawn[name] = panels
    return drawn


def _step_chart(analysis: Analysis, metric: str, title: str) -> Chart:
    """Return a logged metric over steps."""
    curves = {}
    for arm in analysis.arms:
        curve = _logged_curve(arm, metric)
        if curve is not None:
            curves[arm.name] = curve
    chart = _panel(analysis, title, [_Axis("step", "step", 1.0, curves)])
    chart["crowded"] = True  # runs are hidden at first
    return chart


def chart_of(analysis: Analysis, metric: str) -> Chart:
    """Return a metric of evaluations over training time, and over steps if every arm logged them."""
    arms = [arm for arm in analysis.arms if metric in arm.curves]
    over_time = {arm.name: arm.curves[metric] for arm in arms}
    unit = unit_for(max((float(np.nanmax(curve.seconds)) for curve in over_time.values()), default=1.0))
    of_cpu = ""
    if any(arm.config.get("clock") == "cpu" for arm in arms):
        of_cpu = " of processor time"
    axes = [_Axis("time", f"training time ({unit}{of_cpu})", 1 / UNITS[unit], over_time)]
    over_steps = {}
    for arm in arms:
        curve = _curve_over_steps(arm, metric)
        if curve is not None:
            over_steps[arm.name] = curve
    if len(over_steps) == len(arms):
        axes.append(_Axis("step", "step", 1.0, over_steps))
    chart = _panel(analysis, words(metric), axes)
    if metric == analysis.metric and analysis.baseline:
        _add_level(chart, analysis, analysis.baseline, unit, arms)
    return chart


def _add_level(chart: Chart, analysis: Analysis, baseline: Arm, unit: str, arms: Sequence[Arm]) -> None:
    """Add the level that speedups are to, and where the mean of each arm first reaches it."""
    level = analysis.result_of(baseline.name).speedup
    # against itself the baseline has a problem only if its curve has no rise, and so no level
    if level is None or level.problem or not math.isfinite(level.threshold):
        return
    chart["level"] = [rounded(level.threshold), f"99 % of {baseline.label}’s peak"]
    for drawn, arm in zip(chart["arms"], arms, strict=True):
        speedup = analysis.result_of(arm.name).speedup
        if speedup and math.isfinite(speedup.arm_time):
            curve = arm.curves[analysis.metric]
            at = int(np.nanargmin(np.abs(curve.times - speedup.arm_time)))
            drawn["crossing"] = [rounded(speedup.arm_time / UNITS[unit]), rounded(curve.mean[at])]


def _curve_over_steps(arm: Arm, metric: str) -> Curve | None:
    """Return the evaluations of an arm over steps; None if no evaluation logged its step."""
    evals = {}
    for run in arm.runs:
        evals[str(run.path)] = [row for row in run.evals if finite(row.get("step")) is not None]
    return curve_of(evals, metric, "step")


class _Axis(NamedTuple):
    """What a panel is drawn over."""

    key: str
    title: str
    scale: float  # of the curves' seconds
    curves: Mapping[str, Curve]  # by arm


def _panel(analysis: Analysis, y: str, axes: Sequence[_Axis]) -> Chart:
    """Return the lines of each arm that has a curve over every axis."""
    styles = styles_of(analysis)
    drawn = []
    for arm in analysis.arms:
        if all(arm.name in axis.curves for axis in axes):
            drawn.append(
                {
                    "label": arm.label,
                    **styles[arm.name]._asdict(),
                    "crossing": None,
                    "lines": {axis.key: _lines(axis.curves[arm.name], axis.scale) for axis in axes},
                }
            )
    titles = [[axis.key, axis.title] for axis in axes]
    return {"y": y, "x": titles, "level": None, "crowded": len(drawn) > _CROWD, "arms": drawn}


def _logged_curve(arm: Arm, metric: str) -> Curve | None:
    """Return a logged metric over steps, each run's mean within equal intervals of steps; None if no run has it."""
    last = 0.0
    for run in arm.runs:
        steps = [finite(row.get("step")) or 0.0 for row in run.metrics]
        last = max([last, *steps])
    width = max(1.0, last / _BINS)
    evals = {str(run.path): _binned(run, metric, width) for run in arm.runs}
    return curve_of(evals, metric)


def _binned(run: Run, metric: str, width: float) -> list[dict[str, float]]:
    """Return the mean step and value of a logged metric within intervals of steps of this width."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for row in run.metrics:
        step = finite(row.get("step"))
        value = finite(row.get(metric))
        if step is not None and value is not None:
            bins.setdefault(int(step / width), []).append((step, value))
    rows = []
    for place, points in bins.items():
        step, value = np.mean(points, axis=0).tolist()
        rows.append({"due": float(place), "seconds": step, metric: value})
    return rows


def _lines(curve: Curve, scale: float) -> dict[str, Any]:
    """Return one arm over one axis, thinned: runs, and the mean with its interval over runs (of one run: its own)."""
    points = _even(len(curve.due), _MOST_POINTS)
    seeds = []
    if len(curve.runs) > 1:
        low, high = t_band(curve.scores, curve.errors)
        for run in _even(len(curve.runs), _MOST_RUNS):
            name = Path(curve.runs[run]).name.removeprefix("seed-")
            x = curve.seconds[run][points] * scale
            seeds.append([name, _numbers(x), _numbers(curve.scores[run][points])])
    else:
        error = Z_95 * curve.errors[0]
        low = curve.scores[0] - error
        high = curve.scores[0] + error
    return {
        "x": _numbers(curve.times[points] * scale),
        "mean": _numbers(curve.mean[points]),
        "low": _numbers(low[points]),
        "high": _numbers(high[points]),
        "seeds": seeds,
    }


def _even(count: int, most: int) -> list[int]:
    """Return at most this many of the first integers, evenly spread."""
    indices: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return indices


def _numbers(values: Array) -> list[float | None]:
    return [rounded(value) for value in values.tolist()]
