"""The lines of a report's figures as plain data: for the page's script, and for figures in print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runs import Run
from .analysis import Analysis
from .arms import Arm, Curve, curve_of
from .intervals import Array
from .statistics import mean_curve
from .text import UNITS, finite, finite_numbers, plain, rounded, unit_for, words
from .wording import level_text

_TITLES = {
    "reward": "reward, all generated rollouts",
    "reward_std": "spread of reward, all generated rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward, kept rollouts",
    "pods/zero_variance_share": "share of groups with equal kept rewards",
    "frac_reward_zero_std": "share of groups with equal rewards",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "entropy": "entropy",
    "kl": "KL to the reference policy",
    "clip_ratio/region_mean": "share of clipped tokens",
    "learning_rate": "learning rate",
    "completions/mean_length": "completion length, mean",
    "completions/max_length": "completion length, longest",
    "completions/clipped_ratio": "share of completions cut off",
    "tools/call_frequency": "tool calls of a rollout",
    "tools/failure_frequency": "share of tool calls that failed",
}
"""Logged metrics that come first, and their titles. The others follow by their names."""

_CLOCKS = ("step", "seconds", "elapsed", "num_tokens")  # what metrics are drawn over
_MOST_METRICS = 200  # that are drawn
_METRIC_DIGITS = 4

_MOST_RUNS = 20  # drawn of an arm, evenly chosen; means are over all
_MOST_POINTS = 300  # of a line; a longer curve keeps evenly spread ones
_NO_BAND = 2  # runs, whose interval is 13 standard errors wide
_BINS = 150  # points of a logged metric
_CROWD = 6  # with more arms, bands and runs overlap

# Okabe and Ito's palette without its yellow, which is invisible on white; the baseline is grey
_BASELINE = "#5f6368"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 5), (2, 4))

Chart = dict[str, Any]
"""One panel.

``metric`` is its key in a run's files, ``y`` a name, ``x`` a list of [key, label], ``level`` [value, label] or None.
``crowded`` says whether runs and bands are hidden at first, and ``bounds`` which values are possible, or None. Each of
``arms`` has ``label``, ``colour``, ``dash``, by key of x ``lines``, and ``crossing``: time and score where its mean
reaches the level, or None. The lines over an x after the first have only what differs from those over the first.
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

    They are ``scores`` of evaluations, the compared one first, and ``steps``, of every metric that was logged at steps.
    """
    scores = []
    for metric in analysis.metrics:
        chart = _score_chart(analysis, styles, metric)
        if chart["arms"]:
            scores.append(chart)
    steps = _metric_charts(analysis, styles)
    figures = {}
    if scores:
        figures["scores"] = scores
    if steps:
        figures["steps"] = steps
    return figures


def _score_chart(analysis: Analysis, styles: Styles, metric: str) -> Chart:
    """Return a metric of evaluations over training time, and over steps if every arm logged them."""
    arms = [arm for arm in analysis.arms if metric in arm.curves]
    over_time = {}
    last = 0.0
    for arm in arms:
        curve = arm.curves[metric]
        over_time[arm.name] = curve
        last = max(last, float(np.nanmax(curve.seconds)))
    unit = unit_for(last)
    axes = [_Axis("time", f"training time ({unit}{_of_processor(arms)})", 1 / UNITS[unit], over_time)]
    over_steps = {}
    for arm in arms:
        curve_over_steps = _curve_over(arm, metric, "step")
        if curve_over_steps is not None:
            over_steps[arm.name] = curve_over_steps
    if len(over_steps) == len(arms):
        axes.append(_Axis("step", "step", 1.0, over_steps))
    over_tokens = {}
    most_tokens = 0.0
    for arm in arms:
        curve_over_tokens = _curve_over(arm, metric, "num_tokens")
        if curve_over_tokens is not None:
            over_tokens[arm.name] = curve_over_tokens
            most_tokens = max(most_tokens, float(np.nanmax(curve_over_tokens.seconds)))
    if len(over_tokens) == len(arms):
        title, scale = _token_axis(most_tokens)
        axes.append(_Axis("tokens", title, scale, over_tokens))
    y = words(metric)
    if analysis.is_share_of(metric):
        y += " (%)"
    chart = _panel(analysis, styles, metric, y, axes)
    if metric == analysis.metric:
        _add_level(chart, analysis, unit, arms)
    return chart


def _of_processor(arms: Sequence[Arm]) -> str:
    """Return what an axis of time adds if an arm's clock counts processor time."""
    if any(arm.config.get("clock") == "cpu" for arm in arms):
        return " of processor time"
    return ""


def _add_level(chart: Chart, analysis: Analysis, unit: str, arms: Sequence[Arm]) -> None:
    """Add the level that speedups are to, and where the mean of each arm first reaches it."""
    if analysis.baseline is None or analysis.level is None:
        return
    scale = _scale_of(analysis, analysis.metric)
    chart["level"] = [rounded(analysis.level * scale), level_text(analysis.baseline)]
    for drawn, arm in zip(chart["arms"], arms, strict=True):
        speedup = analysis.result_of(arm.name).speedup
        if speedup and math.isfinite(speedup.arm_time):
            curve = arm.curves[analysis.metric]
            known = ~np.isnan(curve.mean)
            score = np.interp(speedup.arm_time, curve.times[known], curve.mean[known])
            drawn["crossing"] = [rounded(speedup.arm_time / UNITS[unit]), rounded(float(score) * scale)]


def _curve_over(arm: Arm, metric: str, clock: str) -> Curve | None:
    """Return the evaluations of an arm over steps or tokens; None if no evaluation has such a number."""
    evals = {}
    for run in arm.runs:
        rows: list[Mapping[str, Any]] = []
        tokens = _tokens_by_step(run)
        for row in run.evals:
            step = finite(row.get("step"))
            if step is None:
                continue
            if clock == "step":
                rows.append(row)
            elif len(tokens) > 1:
                rows.append({**row, clock: float(np.interp(step, *tokens.T))})
        evals[str(run.path)] = rows
    return curve_of(evals, metric, clock)


def _tokens_by_step(run: Run) -> Array:
    """Return the steps at which tokens were logged and the tokens until then, ``[S, 2]``, from step 0."""
    points = [(0.0, 0.0)]
    for row in run.metrics:
        step = finite(row.get("step"))
        tokens = finite(row.get("num_tokens"))
        if step is not None and tokens is not None and step > points[-1][0]:
            points.append((step, tokens))
    return np.array(points)


def _token_axis(most: float) -> tuple[str, float]:
    """Return the title and the scale of an axis of tokens."""
    if most >= 2e6:
        return "million tokens, prompts included", 1e-6
    return "thousand tokens, prompts included", 1e-3


class _Axis(NamedTuple):
    """What a panel is drawn over."""

    key: str
    title: str
    scale: float  # of the curves' seconds
    curves: Mapping[str, Curve]  # by arm


def _panel(analysis: Analysis, styles: Styles, metric: str, y: str, axes: Sequence[_Axis]) -> Chart:
    """Return the lines of each arm that has a curve over every axis."""
    scale = _scale_of(analysis, metric)
    bounds = [0.0, scale] if analysis.is_share_of(metric) else None
    drawn = []
    for arm in analysis.arms:
        lines = {}
        for axis in axes:
            if arm.name in axis.curves:
                lines[axis.key] = _lines(axis.curves[arm.name], axis.scale, bounds, scale)
        if len(lines) == len(axes):
            drawn.append({"label": arm.label, **styles[arm.name]._asdict(), "crossing": None, "lines": lines})
    titles = [[axis.key, axis.title] for axis in axes]
    crowded = len(drawn) > _CROWD
    chart = {"metric": metric, "y": y, "x": titles, "level": None, "crowded": crowded, "arms": drawn}
    return {**chart, "bounds": bounds}


def _scale_of(analysis: Analysis, metric: str) -> float:
    """Return what scores are multiplied with: figures have the unit of sentences and tables."""
    return 100.0 if analysis.is_share_of(metric) else 1.0


# -------------------------------------------------------------------------------------- logged metrics


class _Logged(NamedTuple):
    """The logged metrics of an arm: each run's means within B equal intervals of steps."""

    clocks: Mapping[str, Array]  # by name, mean over runs, [B]
    metrics: Mapping[str, Curve]  # by name


class _ClockAxis(NamedTuple):
    """What logged metrics are drawn over."""

    key: str
    title: str
    clock: str  # its name in metrics.jsonl
    scale: float


def _metric_charts(analysis: Analysis, styles: Styles) -> list[Chart]:
    """Return a panel for every logged metric, over steps, time and tokens, without the lines of single runs."""
    logged: dict[str, _Logged] = {}
    for arm in analysis.arms:
        of_arm = _logged_of(arm)
        if of_arm is not None:
            logged[arm.name] = of_arm
    axes = _metric_axes(analysis, logged)
    panels = []
    for metric in _metrics_in_order(logged.values()):
        drawn = []
        for arm in analysis.arms:
            if arm.name in logged and metric in logged[arm.name].metrics:
                lines = _metric_lines(logged[arm.name], metric, axes)
                drawn.append({"label": arm.label, **styles[arm.name]._asdict(), "crossing": None, "lines": lines})
        title = _TITLES.get(metric) or plain(metric)
        titles = [[axis.key, axis.title] for axis in axes]
        crowded = len(drawn) > _CROWD
        panel = {"metric": metric, "y": title, "x": titles, "level": None, "crowded": crowded, "arms": drawn}
        panels.append({**panel, "bounds": None})
    return panels


def _metrics_in_order(logged: Iterable[_Logged]) -> list[str]:
    """Return the metrics that some arm logged, those with a title first."""
    found: set[str] = set()
    for of_arm in logged:
        found |= of_arm.metrics.keys()
    first = [metric for metric in _TITLES if metric in found]
    others = sorted(found.difference(first))
    return [*first, *others][:_MOST_METRICS]


def _metric_axes(analysis: Analysis, logged: Mapping[str, _Logged]) -> list[_ClockAxis]:
    """Return key, title, clock and scale of each axis that every arm has."""
    last = {}
    for clock in _CLOCKS:
        ends = []
        for of_arm in logged.values():
            if clock in of_arm.clocks:
                ends.append(float(np.nanmax(of_arm.clocks[clock])))
        if len(ends) == len(logged):
            last[clock] = max(ends, default=0.0)
    axes = [_ClockAxis("step", "step", "step", 1.0)]
    if "seconds" in last:
        unit = unit_for(last["seconds"])
        title = f"training time ({unit}{_of_processor(analysis.arms)})"
        axes.append(_ClockAxis("time", title, "seconds", 1 / UNITS[unit]))
    if "num_tokens" in last:
        title, scale = _token_axis(last["num_tokens"])
        axes.append(_ClockAxis("tokens", title, "num_tokens", scale))
    return axes


def _metric_lines(logged: _Logged, metric: str, axes: Sequence[_ClockAxis]) -> dict[str, Any]:
    """Return the line of an arm over the first axis, and its x over the others."""
    curve = logged.metrics[metric]
    has_mean = np.flatnonzero(~np.isnan(curve.mean))
    low, high = _band_of(curve)
    lines: dict[str, Any] = {}
    for axis in axes:
        lines[axis.key] = {"x": _numbers(logged.clocks[axis.clock][has_mean] * axis.scale)}
    lines[axes[0].key] |= {
        "mean": _numbers(curve.mean[has_mean], _METRIC_DIGITS),
        "low": _numbers(low[has_mean], _METRIC_DIGITS),
        "high": _numbers(high[has_mean], _METRIC_DIGITS),
        "seeds": [],
    }
    return lines


def _logged_of(arm: Arm) -> _Logged | None:
    """Return the logged metrics of an arm; None if no run has logged a step."""
    last = 0.0
    for run in arm.runs:
        steps = finite_numbers(row.get("step") for row in run.metrics)
        last = max([last, *steps])
    if last <= 0:
        return None
    width = max(1.0, (last + 1) / _BINS)
    names = tuple(str(run.path) for run in arm.runs)
    count = int(last / width) + 1
    tables: dict[str, Array] = {}  # by metric, [R, B]
    for place, run in enumerate(arm.runs):
        for metric, values in _binned(run, width, count).items():
            table = tables.setdefault(metric, np.full((len(names), count), np.nan))
            table[place] = values
    clocks = {}
    for clock in _CLOCKS:
        if clock in tables and not np.isnan(mean_curve(tables[clock])).all():
            clocks[clock] = mean_curve(tables[clock])
    if "step" not in clocks:
        return None
    due = np.arange(count, dtype=np.float64)
    metrics = {}
    for metric, table in tables.items():
        if metric not in _CLOCKS and not np.isnan(mean_curve(table)).all():
            metrics[metric] = Curve(names, due, tables["step"], table, np.full_like(table, np.nan))
    return _Logged(clocks, metrics)


def _binned(run: Run, width: float, count: int) -> dict[str, Array]:
    """Return the mean of every logged number within intervals of steps of this width, ``[B]``; NaN without one."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    for row in run.metrics:
        step = finite(row.get("step"))
        if step is None or step < 0:
            continue
        place = int(step / width)
        for metric, logged in row.items():
            value = finite(logged)
            if value is not None:
                places, values = points.setdefault(metric, ([], []))
                places.append(place)
                values.append(value)
    means = {}
    for metric, (places, values) in points.items():
        sums = np.bincount(places, weights=values, minlength=count)
        counts = np.bincount(places, minlength=count)
        means[metric] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


# ---------------------------------------------------------------------------------------------- lines


def _lines(curve: Curve, scale: float, bounds: Sequence[float] | None, y_scale: float) -> dict[str, Any]:
    """Return one arm over one axis, thinned: runs, and the mean with its interval over runs (of one run: its own).

    Intervals are cut at the bounds: no share is below 0 or above 1.
    """
    points = _even(len(curve.due), _MOST_POINTS)
    low, high = (edge * y_scale for edge in _band_of(curve))
    if bounds is not None:
        low = np.clip(low, bounds[0], bounds[1])
        high = np.clip(high, bounds[0], bounds[1])
    seeds = []
    if len(curve.runs) > 1:
        for run in _even(len(curve.runs), _MOST_RUNS):
            name = Path(curve.runs[run]).name.removeprefix("seed-")
            x = curve.seconds[run][points] * scale
            seeds.append([name, _numbers(x), _numbers(curve.scores[run][points] * y_scale)])
    return {
        "x": _numbers(curve.times[points] * scale),
        "mean": _numbers(curve.mean[points] * y_scale),
        "low": _numbers(low[points]),
        "high": _numbers(high[points]),
        "seeds": seeds,
    }


def _band_of(curve: Curve) -> tuple[Array, Array]:
    """Return the band of a curve; NaN for two runs, whose interval says nothing: a figure draws the runs instead."""
    if len(curve.runs) == _NO_BAND:
        nothing = np.full(len(curve.due), math.nan)
        return nothing, nothing
    return curve.band


def _even(count: int, most: int) -> list[int]:
    """Return at most this many of the first integers, evenly spread."""
    indices: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return indices


def _numbers(values: Array, digits: int = 5) -> list[float | None]:
    return [rounded(value, digits) for value in values.tolist()]
