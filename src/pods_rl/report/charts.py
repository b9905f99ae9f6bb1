"""The lines of a report's figures as plain data: for the page's script, and for figures in print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
    colours = len(_COLOURS)
    return [Style(_COLOURS[at % colours], _DASHES[at // colours % len(_DASHES)]) for at in range(count)]


def styles_of(analysis: Analysis) -> dict[str, Style]:
    """Return the style of each arm by name, the same in every figure; the arm that the report is about comes first."""
    subject = analysis.pairs[0].arm if analysis.pairs else None
    others = [arm for arm in analysis.arms if arm is not analysis.baseline]
    others.sort(key=lambda arm: arm is not subject)
    styles = {arm.name: style for arm, style in zip(others, line_styles(len(others)), strict=True)}
    return styles | ({analysis.baseline.name: Style(_BASELINE)} if analysis.baseline else {})


def charts(analysis: Analysis) -> dict[str, list[Chart]]:
    """Return the panels of the page's figures: ``scores`` of evaluations, the compared one first, and ``steps``."""
    scores = [chart_of(analysis, name) for name in analysis.metrics]
    steps = []
    for metric, title in STEP_METRICS.items():  # runs are hidden at first
        curves = {arm.name: curve for arm in analysis.arms if (curve := _logged_curve(arm, metric))}
        steps.append(_panel(analysis, title, {"step": ("step", 1.0, curves)}) | {"crowded": True})
    found = {name: [one for one in panels if one["arms"]] for name, panels in (("scores", scores), ("steps", steps))}
    return {name: panels for name, panels in found.items() if panels}


def chart_of(analysis: Analysis, metric: str) -> Chart:
    """Return a metric of evaluations over training time, and over steps if every arm logged them."""
    arms = [arm for arm in analysis.arms if metric in arm.curves]
    own = {arm.name: arm.curves[metric] for arm in arms}
    unit = unit_for(max((float(np.nanmax(curve.seconds)) for curve in own.values()), default=1.0))
    of_cpu = " of processor time" if any(arm.config.get("clock") == "cpu" for arm in arms) else ""
    over_steps = {}
    for arm in arms:
        evals = {str(run.path): [row for row in run.evals if finite(row.get("step")) is not None] for run in arm.runs}
        if curve := curve_of(evals, metric, "step"):
            over_steps[arm.name] = curve
    axes = {"time": (f"training time ({unit}{of_cpu})", 1 / UNITS[unit], own)}
    axes |= {"step": ("step", 1.0, over_steps)} if len(over_steps) == len(arms) else {}
    chart = _panel(analysis, words(metric), axes)
    base = analysis.baseline if metric == analysis.metric else None
    level = analysis.speedup_of(base.name) if base else None
    # against itself the baseline has a problem only if its curve has no rise, and so no level
    if base is None or level is None or level.problem or not math.isfinite(level.threshold):
        return chart
    for drawn, arm in zip(chart["arms"], arms, strict=True):
        result = analysis.speedup_of(arm.name)
        if result and math.isfinite(result.arm_time):
            at = int(np.nanargmin(np.abs(own[arm.name].times - result.arm_time)))
            drawn["crossing"] = [rounded(result.arm_time / UNITS[unit]), rounded(own[arm.name].mean[at])]
    return chart | {"level": [rounded(level.threshold), f"99 % of {base.label}’s peak"]}


def _panel(analysis: Analysis, y: str, axes: Mapping[str, tuple[str, float, Mapping[str, Curve]]]) -> Chart:
    """Return the lines of each arm over each axis: its key, its label, the scale of its numbers, and the curves."""
    styles = styles_of(analysis)
    drawn = [
        {
            "label": arm.label,
            **styles[arm.name]._asdict(),
            "crossing": None,
            "lines": {key: _lines(curves[arm.name], scale) for key, (_, scale, curves) in axes.items()},
        }
        for arm in analysis.arms
        if all(arm.name in curves for _, _, curves in axes.values())
    ]
    titles = [[key, title] for key, (title, *_) in axes.items()]
    return {"y": y, "x": titles, "level": None, "crowded": len(drawn) > _CROWD, "arms": drawn}


def _logged_curve(arm: Arm, metric: str) -> Curve | None:
    """Return a logged metric over steps, each run's mean within equal intervals of steps; None if no run has it."""
    points = {
        str(run.path): [(finite(row.get("step")), finite(row.get(metric))) for row in run.metrics] for run in arm.runs
    }
    width = max(1.0, max((step or 0.0 for known in points.values() for step, _ in known), default=0.0) / _BINS)
    runs: dict[str, list[dict[str, float]]] = {}
    for run, known in points.items():
        bins: dict[int, list[tuple[float, float]]] = {}
        for step, value in known:
            if step is not None and value is not None:
                bins.setdefault(int(step / width), []).append((step, value))
        means = {place: np.mean(inside, axis=0).tolist() for place, inside in bins.items()}
        runs[run] = [{"due": place, "seconds": step, metric: value} for place, (step, value) in means.items()]
    return curve_of(runs, metric)


def _lines(curve: Curve, scale: float) -> dict[str, Any]:
    """Return one arm over one axis, thinned: runs, and the mean with its interval over runs (of one run: its own)."""
    points, runs = _even(len(curve.due), _MOST_POINTS), _even(len(curve.runs), _MOST_RUNS)
    if len(curve.runs) > 1:
        low, high = t_band(curve.scores, curve.errors)
    else:
        error = Z_95 * curve.errors[0]
        low = curve.scores[0] - error
        high = curve.scores[0] + error
    lines = {"x": curve.times * scale, "mean": curve.mean, "low": low, "high": high}
    tables = curve.seconds * scale, curve.scores
    seeds = [
        [Path(curve.runs[run]).name.removeprefix("seed-"), *(_numbers(table[run][points]) for table in tables)]
        for run in (runs if len(curve.runs) > 1 else [])
    ]
    return {key: _numbers(values[points]) for key, values in lines.items()} | {"seeds": seeds}


def _even(count: int, most: int) -> list[int]:
    """Return at most this many of the first integers, evenly spread."""
    found: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return found


def _numbers(values: Array) -> list[float | None]:
    return [rounded(value) for value in values.tolist()]
