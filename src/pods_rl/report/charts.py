"""The lines of a report's figures as plain data, for the page's script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runs import Run
from .analysis import Analysis
from .arms import Arm, curve_of
from .intervals import Array
from .statistics import Curve, mean_curve
from .text import TIME_UNITS, finite, finite_numbers, one_line, rounded, significant, unit_for, words

_METRIC_TITLES = {
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

_CLOCKS = ("step", "seconds", "elapsed")  # not drawn over another clock
_MOST_METRICS = 200  # that are drawn

_MOST_RUNS = 20  # drawn of an arm, evenly chosen; means are over all
_MOST_POINTS = 300  # of a line; a longer curve keeps evenly spread ones
_BINS = 150  # points of a logged metric
_CROWD = 6  # with more arms, bands and runs overlap

# Okabe and Ito's palette. Its yellow is invisible on white and its black on a dark page, where arms keep their colours.
_BASELINE = "#7b8087"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A6324")
_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 5), (2, 4))


class Style(NamedTuple):
    """A colour, and the lengths of dashes and gaps in points; none for a solid line."""

    colour: str
    dash: tuple[int, ...] = ()


Styles = Mapping[str, Style]  # by the arm's name
PlotValues = list[float | None]


@dataclass(frozen=True)
class Line:
    """An arm over one axis. Over an axis after the first it may have only x: the rest is as over the first."""

    x: PlotValues
    mean: PlotValues | None = None
    low: PlotValues | None = None  # of the band
    high: PlotValues | None = None
    seeds: list[tuple[str, PlotValues, PlotValues]] | None = None  # name, x and y of each run that is drawn


@dataclass(frozen=True)
class Series:
    """An arm in a panel."""

    label: str
    colour: str
    dash: tuple[int, ...]
    lines: dict[str, Line]  # by the key of the axis


@dataclass(frozen=True)
class Panel:
    """A metric of all arms, over each of its axes."""

    metric: str  # its key in a run's files
    y: str  # its name
    x: list[tuple[str, str]]  # key and title of each axis
    arms: list[Series]
    bounds: tuple[float, float] | None = None  # of the values that are possible
    target: tuple[float, str] | None = None  # that speedups are to, and its name

    def data(self) -> dict[str, Any]:
        """Return the panel for the page's script, without what is missing; `crowded`: hide runs and bands at first."""
        data = asdict(self, dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None})
        return data | {"crowded": len(self.arms) > _CROWD}


def styles_of(analysis: Analysis) -> dict[str, Style]:
    """Return the style of each arm by name, the same in every figure and theme; up to 21 arms next to the baseline."""
    styles = {}
    for rank, arm in enumerate(arm for arm in analysis.arms if arm is not analysis.baseline):
        rounds, colour = divmod(rank, len(_COLOURS))
        styles[arm.name] = Style(_COLOURS[colour], _DASHES[rounds % len(_DASHES)])
    if analysis.baseline:
        styles[analysis.baseline.name] = Style(_BASELINE)
    return styles


def charts(analysis: Analysis, styles: Styles) -> dict[str, list[Panel]]:
    """Return the panels that have a line: ``scores``, the compared one first, and ``steps``, every logged metric."""
    figures = {
        "scores": [_score_panel(analysis, styles, metric) for metric in analysis.metrics],
        "steps": _metric_panels(analysis, styles),
    }
    with_lines = {name: [panel for panel in panels if panel.arms] for name, panels in figures.items()}
    return {name: panels for name, panels in with_lines.items() if panels}


class _Axis(NamedTuple):
    """An axis that a panel is drawn over."""

    key: str
    title: str
    scale: float  # of the clock's values


_CLOCK_OF_AXIS = {"time": "seconds", "step": "step"}  # names in the files of a run


def _axis(key: str, end: float, arms: Sequence[Arm]) -> _Axis:
    """Return an axis, whose unit is by its last value."""
    if key == "step":
        return _Axis(key, "step", 1.0)
    unit = unit_for(end)
    of_processor = " of processor time" if any(arm.config.get("clock") == "cpu" for arm in arms) else ""
    return _Axis(key, f"training time ({unit}{of_processor})", 1 / TIME_UNITS[unit])


def _score_panel(analysis: Analysis, styles: Styles, metric: str) -> Panel:
    """Return a metric of evaluations over training time, and over steps if every arm logged them."""
    arms = [arm for arm in analysis.arms if metric in arm.curves]
    curves = {"time": [arm.curves[metric] for arm in arms]}  # by the key of the axis, one of each arm
    over_steps: list[Curve] = []
    for arm in arms:
        # without this, the nominal second would stand for a missing step
        evals = {str(run.path): [row for row in run.evals if finite(row.get("step")) is not None] for run in arm.runs}
        curve = curve_of(evals, metric, "step")
        if curve is not None:
            over_steps.append(curve)
    if len(over_steps) == len(arms):
        curves["step"] = over_steps
    axes = []
    for key, of_arms in curves.items():
        end = max((float(np.nanmax(curve.seconds)) for curve in of_arms), default=0.0)
        axes.append(_axis(key, end, arms))
    # figures have the unit of sentences and tables
    is_share = analysis.is_share_of(metric)
    scale = 100.0 if is_share else 1.0
    bounds = (0.0, 100.0) if is_share else None
    target = None
    if metric == analysis.metric and analysis.target is not None and analysis.baseline is not None:
        target = (significant(analysis.target * scale), f"1 % below {analysis.baseline.label}’s peak")
    series = []
    for index, arm in enumerate(arms):
        lines = {axis.key: _line(curves[axis.key][index], axis.scale, bounds, scale) for axis in axes}
        series.append(Series(arm.label, *styles[arm.name], lines))
    y = words(metric) + (" (%)" if is_share else "")
    return Panel(metric, y, [(axis.key, axis.title) for axis in axes], series, bounds, target)


# -------------------------------------------------------------------------------------- logged metrics


class _Logged(NamedTuple):
    """The logged metrics of an arm: each run's means within B equal intervals of steps."""

    clocks: Mapping[str, Array]  # by the key of the axis, mean over runs, [B]
    metrics: Mapping[str, Curve]  # by name


def _metric_panels(analysis: Analysis, styles: Styles) -> list[Panel]:
    """Return a panel for every logged metric, over steps and time, without the lines of single runs."""
    logged: dict[str, _Logged] = {}
    for arm in analysis.arms:
        of_arm = _logged_of(arm)
        if of_arm is not None:
            logged[arm.name] = of_arm
    axes = []
    for key in ("step", "time"):
        ends = [float(np.nanmax(of_arm.clocks[key])) for of_arm in logged.values() if key in of_arm.clocks]
        if len(ends) == len(logged):
            axes.append(_axis(key, max(ends, default=0.0), analysis.arms))
    found = {metric for of_arm in logged.values() for metric in of_arm.metrics}
    with_title = [metric for metric in _METRIC_TITLES if metric in found]
    in_order = [*with_title, *sorted(found.difference(with_title))]
    titles = [(axis.key, axis.title) for axis in axes]
    panels = []
    for metric in in_order[:_MOST_METRICS]:
        series = []
        for arm in analysis.arms:
            if arm.name in logged and metric in logged[arm.name].metrics:
                lines = _metric_lines(logged[arm.name], metric, axes)
                series.append(Series(arm.label, *styles[arm.name], lines))
        panels.append(Panel(metric, _METRIC_TITLES.get(metric) or one_line(metric), titles, series))
    return panels


def _metric_lines(logged: _Logged, metric: str, axes: Sequence[_Axis]) -> dict[str, Line]:
    """Return the line of an arm over the first axis, and its x over the others."""
    curve = logged.metrics[metric]
    has_mean = np.flatnonzero(~np.isnan(curve.mean))
    mean = _values(curve.mean[has_mean])
    low, high = (_values(edge[has_mean]) for edge in curve.interval)
    lines: dict[str, Line] = {}
    for axis in axes:
        x = _values(logged.clocks[axis.key][has_mean] * axis.scale)
        lines[axis.key] = Line(x) if lines else Line(x, mean, low, high, [])
    return lines


def _logged_of(arm: Arm) -> _Logged | None:
    """Return the logged metrics of an arm; None if no run has logged a step."""
    last = max(finite_numbers(row.get("step") for run in arm.runs for row in run.metrics), default=0.0)
    if last <= 0:
        return None
    width = max(1.0, (last + 1) / _BINS)
    names = tuple(str(run.path) for run in arm.runs)
    count = int(last / width) + 1
    tables: dict[str, Array] = {}  # by metric, [R, B]
    for row, run in enumerate(arm.runs):
        for metric, values in _binned(run, width, count).items():
            table = tables.setdefault(metric, np.full((len(names), count), np.nan))
            table[row] = values
    tables = {metric: table for metric, table in tables.items() if not np.isnan(mean_curve(table)).all()}
    if "step" not in tables:
        return None
    clocks = {key: mean_curve(tables[clock]) for key, clock in _CLOCK_OF_AXIS.items() if clock in tables}
    due = np.arange(count, dtype=np.float64)
    errors = np.full((len(names), count), np.nan)
    metrics = {
        metric: Curve(names, due, tables["step"], table, errors)
        for metric, table in tables.items()
        if metric not in _CLOCKS
    }
    return _Logged(clocks, metrics)


def _binned(run: Run, width: float, count: int) -> dict[str, Array]:
    """Return the mean of every logged number within intervals of steps of this width, ``[B]``; NaN without one."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    for row in run.metrics:
        step = finite(row.get("step"))
        if step is None or step < 0:
            continue
        interval = int(step / width)
        for metric, logged in row.items():
            value = finite(logged)
            if value is not None:
                intervals, values = points.setdefault(metric, ([], []))
                intervals.append(interval)
                values.append(value)
    means = {}
    for metric, (intervals, values) in points.items():
        sums = np.bincount(intervals, weights=values, minlength=count)
        counts = np.bincount(intervals, minlength=count)
        means[metric] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


# ---------------------------------------------------------------------------------------------- lines


def _line(curve: Curve, scale: float, bounds: tuple[float, float] | None, y_scale: float) -> Line:
    """Return one arm over one axis, thinned: runs, and the mean with its interval over runs."""
    points = _even(len(curve.due), _MOST_POINTS)
    low, high = (edge * y_scale for edge in curve.interval)
    if bounds is not None:  # no share is below 0 or above 1
        low = np.clip(low, *bounds)
        high = np.clip(high, *bounds)
    seeds = []
    if len(curve.runs) > 1:
        for run in _even(len(curve.runs), _MOST_RUNS):
            name = Path(curve.runs[run]).name.removeprefix("seed-")
            x = curve.seconds[run][points] * scale
            seeds.append((name, _values(x), _values(curve.scores[run][points] * y_scale)))
    x = _values(curve.times[points] * scale)
    return Line(x, _values(curve.mean[points] * y_scale), _values(low[points]), _values(high[points]), seeds)


def _even(count: int, most: int) -> list[int]:
    """Return at most this many of the first integers, evenly spread."""
    indices: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return indices


def _values(values: Array) -> PlotValues:
    return [rounded(value) for value in values.tolist()]
