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
from .intervals import Array
from .text import UNITS, finite, finite_numbers, rounded, unit_for, words
from .wording import level_text

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
"""One panel.

``metric`` is its key in a run's files, ``y`` a name, ``x`` a list of [key, label], ``level`` [value, label] or None.
``crowded`` says whether runs and bands are hidden at first. Each of ``arms`` has ``label``, ``colour``, ``dash``, by
key of x ``lines``, and ``crossing``: time and score of the checkpoint at which its mean reaches the level, or None.
"""


class Style(NamedTuple):
    """A colour, and the lengths of dashes and gaps in points; none for a solid line."""

    colour: str
    dash: tuple[int, ...] = ()


Styles = Mapping[str, Style]  # by the arm's name


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
    coloured = [arm for arm in analysis.arms if arm is not analysis.baseline]
    coloured.sort(key=lambda arm: arm is not analysis.subject)
    styles = {}
    for arm, style in zip(coloured, line_styles(len(coloured)), strict=True):
        styles[arm.name] = style
    if analysis.baseline:
        styles[analysis.baseline.name] = Style(_BASELINE)
    return styles


def charts(analysis: Analysis, styles: Styles) -> dict[str, list[Chart]]:
    """Return the panels of the figures that have a line.

    They are ``scores`` of evaluations, the compared one first, and ``steps``, of what was logged at each step.
    """
    scores = []
    for metric in analysis.metrics:
        chart = _score_chart(analysis, styles, metric)
        if chart["arms"]:
            scores.append(chart)
    steps = []
    for metric, title in STEP_METRICS.items():
        chart = _step_chart(analysis, styles, metric, title)
        if chart["arms"]:
            steps.append(chart)
    figures = {}
    if scores:
        figures["scores"] = scores
    if steps:
        figures["steps"] = steps
    return figures


def _step_chart(analysis: Analysis, styles: Styles, metric: str, title: str) -> Chart:
    """Return a logged metric over steps."""
    curves = {}
    for arm in analysis.arms:
        curve = _logged_curve(arm, metric)
        if curve is not None:
            curves[arm.name] = curve
    chart = _panel(analysis, styles, metric, title, [_Axis("step", "step", 1.0, curves)])
    chart["crowded"] = True  # runs are hidden at first
    return chart


def _score_chart(analysis: Analysis, styles: Styles, metric: str) -> Chart:
    """Return a metric of evaluations over training time, and over steps if every arm logged them."""
    arms = [arm for arm in analysis.arms if metric in arm.curves]
    over_time = {}
    last = 0.0
    of_cpu = ""
    for arm in arms:
        curve = arm.curves[metric]
        over_time[arm.name] = curve
        last = max(last, float(np.nanmax(curve.seconds)))
        if arm.config.get("clock") == "cpu":
            of_cpu = " of processor time"
    unit = unit_for(last)
    axes = [_Axis("time", f"training time ({unit}{of_cpu})", 1 / UNITS[unit], over_time)]
    over_steps = {}
    for arm in arms:
        curve_over_steps = _curve_over_steps(arm, metric)
        if curve_over_steps is not None:
            over_steps[arm.name] = curve_over_steps
    if len(over_steps) == len(arms):
        axes.append(_Axis("step", "step", 1.0, over_steps))
    chart = _panel(analysis, styles, metric, words(metric), axes)
    if metric == analysis.metric:
        _add_level(chart, analysis, unit, arms)
    return chart


def _add_level(chart: Chart, analysis: Analysis, unit: str, arms: Sequence[Arm]) -> None:
    """Add the level that speedups are to, and where the mean of each arm first reaches it."""
    if analysis.baseline is None or analysis.level is None:
        return
    chart["level"] = [rounded(analysis.level), level_text(analysis.baseline)]
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
        evals[str(run.path)] = _with_step(run)
    return curve_of(evals, metric, "step")


def _with_step(run: Run) -> list[Mapping[str, Any]]:
    """Return the evaluations of a run that logged their step."""
    rows: list[Mapping[str, Any]] = []
    for row in run.evals:
        if finite(row.get("step")) is not None:
            rows.append(row)
    return rows


class _Axis(NamedTuple):
    """What a panel is drawn over."""

    key: str
    title: str
    scale: float  # of the curves' seconds
    curves: Mapping[str, Curve]  # by arm


def _panel(analysis: Analysis, styles: Styles, metric: str, y: str, axes: Sequence[_Axis]) -> Chart:
    """Return the lines of each arm that has a curve over every axis."""
    drawn = []
    for arm in analysis.arms:
        lines = {}
        for axis in axes:
            if arm.name in axis.curves:
                lines[axis.key] = _lines(axis.curves[arm.name], axis.scale)
        if len(lines) == len(axes):
            drawn.append({"label": arm.label, **styles[arm.name]._asdict(), "crossing": None, "lines": lines})
    titles = [[axis.key, axis.title] for axis in axes]
    crowded = len(drawn) > _CROWD
    return {"metric": metric, "y": y, "x": titles, "level": None, "crowded": crowded, "arms": drawn}


def _logged_curve(arm: Arm, metric: str) -> Curve | None:
    """Return a logged metric over steps, each run's mean within equal intervals of steps; None if no run has it."""
    last = 0.0
    for run in arm.runs:
        steps = finite_numbers(row.get("step") for row in run.metrics)
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
    low, high = curve.band
    seeds = []
    if len(curve.runs) > 1:
        for run in _even(len(curve.runs), _MOST_RUNS):
            name = Path(curve.runs[run]).name.removeprefix("seed-")
            x = curve.seconds[run][points] * scale
            seeds.append([name, _numbers(x), _numbers(curve.scores[run][points])])
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
