"""Figures of arms over training time, and captions of what is drawn in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .plots import CROWD, WIDE, Role, add_legend, line_styles, new_figure, styled
from .statistics import Z_95, Array, mean_curve, normal_band
from .text import UNITS, names, plain, plural, unit_for

MOST_RUNS = 60  # of an arm, drawn thin
_POINTS_A_RUN = 500
_POINTS = 4000  # beyond which the thin lines are drawn as an image, to keep an SVG small
_TEXT = "#3c4043"


@dataclass(frozen=True)
class Line:
    """One arm of a figure over training time: R runs, C checkpoints, seconds."""

    label: str
    seconds: Array  # [R, C]
    scores: Array  # [R, C]
    role: Role = "arm"
    crossing: float = math.inf  # seconds; inf: none to mark
    errors: Array | None = None  # [R, C] standard errors of the evaluations, drawn if there is one run
    clock: str = "wall"  # what the seconds are: see the recipe key

    @property
    def drawn_runs(self) -> list[int]:
        """The runs that are drawn thin: none beside their own mean, at most ``MOST_RUNS``, evenly chosen."""
        runs = len(self.scores)
        if runs == 1:
            return []
        return np.linspace(0, runs - 1, min(runs, MOST_RUNS)).round().astype(int).tolist()

    @property
    def band(self) -> tuple[Array, Array] | None:
        """1.96 standard errors about the mean: over runs, or of the evaluation if there is one run; else None."""
        if len(self.scores) > 1:
            return normal_band(self.scores)
        if self.errors is None or np.isnan(self.errors).all():
            return None
        return self.scores[0] - Z_95 * self.errors[0], self.scores[0] + Z_95 * self.errors[0]


@dataclass(frozen=True)
class Point:
    """One value of an ablation: the final score of its arm, and that of each run."""

    label: str
    mean: float
    low: float  # NaN: no interval
    high: float
    runs: Array = field(default_factory=lambda: np.empty(0))


@styled
def curves_figure(
    lines: Sequence[Line],
    *,
    metric: str = "accuracy",
    threshold: float | None = None,
    threshold_label: str = "",
    width: float = WIDE,
) -> Figure:
    """Score against training time: runs thin, their mean thick with its 95 % band, crossings marked.

    Args:
        lines: arms; a run's NaN checkpoints are skipped. An ``other`` arm is a thin grey mean, and all of them share
            an entry of the legend. Above ``CROWD`` arms there are no bands, and the axis holds the means only.
        metric: for the axis.
        threshold: a score to draw as a dashed line; each line's ``crossing`` is marked on it.
        threshold_label: of that line, in the legend.
        width: inches.
    """
    figure = new_figure(width, 4.2 if width == WIDE else 4.0)
    axes = figure.add_subplot()
    entries = _draw_lines(axes, lines)
    if threshold is not None and math.isfinite(threshold):
        entries.append((_mark_threshold(axes, lines, threshold), threshold_label))
    axes.set_ylabel(metric)
    add_legend(figure, entries, width)
    return figure


@styled
def ablation_figure(lines: Sequence[Line], points: Sequence[Point], *, metric: str, width: float = WIDE) -> Figure:
    """One setting varied: the arms' curves, and their final scores with 95 % interval and every run.

    Args:
        lines: an arm for each value of the setting, in order; its label is the value.
        points: the same arms' final scores.
        metric: for the axes.
        width: inches; a narrow figure has its panels below each other.
    """
    if width == WIDE:
        figure = new_figure(width, 3.7)
        left, right = figure.subplots(1, 2, width_ratios=[1.65, 1])
    else:
        figure = new_figure(width, 6.2)
        left, right = figure.subplots(2, 1, height_ratios=[1.35, 1])
    entries = _draw_lines(left, lines)
    left.set_ylabel(metric)
    for x, (point, style) in enumerate(zip(points, line_styles([line.role for line in lines]), strict=True)):
        colour = style["color"]
        dots = point.runs[:: math.ceil(len(point.runs) / 200) or 1]
        right.plot(np.full(len(dots), x - 0.2), dots, "o", color=colour, alpha=0.45, markersize=4, mew=0)
        error = None if math.isnan(point.low) else [[point.mean - point.low], [point.high - point.mean]]
        look: dict[str, Any] = {"capsize": 4, "elinewidth": 1.8, "markersize": 7, "zorder": 3}
        right.errorbar([x], [point.mean], yerr=error, fmt="o", color=colour, **look)
    names = [plain(point.label, 16).replace(" (", "\n(") for point in points]
    right.set_xticks(range(len(points)), names, fontsize=9)
    if sum(map(len, names)) > 34:
        right.tick_params(axis="x", labelrotation=20)
    right.set_xlim(-0.5, len(points) - 0.5)
    right.set_title(f"final {metric}", fontsize=10.5, loc="left")
    right.grid(visible=False, axis="x")
    add_legend(figure, entries, width)
    return figure


def _named(lines: Sequence[Line]) -> Sequence[Line]:
    """The arms that decide the axes: all but the grey ones, if there are others."""
    return [line for line in lines if line.role != "other"] or lines


def _unit(lines: Sequence[Line]) -> tuple[str, float]:
    """The unit of the time axis, and the longest time of the named arms in it."""
    longest = max((float(np.nanmax(line.seconds)) for line in _named(lines)), default=1.0)
    return unit_for(longest), longest / UNITS[unit_for(longest)]


def _draw_lines(axes: Axes, lines: Sequence[Line]) -> list[tuple[Any, str]]:
    """Draw arms over time, and the limits and name of the time axis; an entry of the legend for each, one for all
    grey arms."""
    crowded = sum(line.role != "other" for line in lines) > CROWD
    points = sum(line.scores.size for line in lines if line.role != "other")
    unit, longest = _unit(lines)
    entries, others = [], []
    for rank, (line, style) in enumerate(zip(lines, line_styles([line.role for line in lines]), strict=True)):
        layer = 2.1 if line.role == "other" else 3.9 if line.role == "reference" else 3 + 0.1 * min(rank, 8)
        look = {**style, "zorder": layer}
        handle = _draw_line(axes, line, look, UNITS[unit], crowded=crowded, rasterized=points > _POINTS)
        if line.role == "other":
            others.append(handle)
        else:
            entries.append((handle, line.label))
    if others:
        entries.append((others[0], plural(len(others), "other arm")))
    if crowded or others:
        axes.set_ylim(*_limits(lines, means_only=crowded))
    axes.set_xlim(0, longest * 1.02 or 1)
    of_cpu = " of processor time" if any(line.clock == "cpu" for line in lines) else ""
    axes.set_xlabel(f"training time ({unit}{of_cpu})")
    return entries


def _draw_line(axes: Axes, line: Line, style: dict[str, Any], unit: float, *, crowded: bool, rasterized: bool) -> Any:
    time_C, mean_C = mean_curve(line.seconds) / unit, mean_curve(line.scores)
    known = ~np.isnan(mean_C)
    if line.role == "other":
        (handle,) = axes.plot(time_C[known], mean_C[known], linewidth=1.2, **style)
        return handle
    for run in line.drawn_runs:
        seconds_C, scores_C = line.seconds[run], line.scores[run]
        there = np.flatnonzero(~np.isnan(scores_C))
        there = there[:: math.ceil(len(there) / _POINTS_A_RUN)] if len(there) > _POINTS_A_RUN else there
        look = {**style, "marker": "." if len(there) == 1 else None, "alpha": 0.1 if crowded else 0.28}
        look |= {"linewidth": 0.8, "rasterized": rasterized, "zorder": 2.2}
        axes.plot(seconds_C[there] / unit, scores_C[there], **look)
    if not crowded and line.band:
        low_C, high_C = line.band
        look = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
        axes.fill_between(time_C[known], low_C[known], high_C[known], zorder=2.4, **look)
    marker = "." if known.sum() == 1 else None
    (handle,) = axes.plot(time_C[known], mean_C[known], linewidth=2.3, marker=marker, **style)
    return handle


def _limits(lines: Sequence[Line], *, means_only: bool = False) -> tuple[float, float]:
    """The range of scores that holds every run of the named arms, or their means, with a margin."""
    values = np.concatenate([mean_curve(line.scores) if means_only else line.scores.ravel() for line in _named(lines)])
    if np.isnan(values).all():
        return 0.0, 1.0
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.08 * (high - low) or 0.05
    return low - margin, high + margin


def _mark_threshold(axes: Axes, lines: Sequence[Line], threshold: float) -> Any:
    """The dashed line, and for each arm that crosses it a dot, a drop line and the time at its foot; its handle."""
    level = axes.axhline(threshold, color=_TEXT, linewidth=1, linestyle=(0, (4, 3)), zorder=2.5)
    unit, _ = _unit(lines)
    foot = axes.get_ylim()[0]
    crossing = [
        (line.crossing / UNITS[unit], style["color"])
        for line, style in zip(lines, line_styles([line.role for line in lines]), strict=True)
        if math.isfinite(line.crossing) and line.role != "other"
    ]
    for rank, (x, colour) in enumerate(crossing):
        axes.plot([x, x], [foot, threshold], ":", color=colour, linewidth=1.2, zorder=2.6)
        axes.plot([x], [threshold], "o", color=colour, markeredgecolor="white", markersize=7, zorder=6)
        if len(crossing) <= CROWD:  # the times of more arms would overlap
            offset: dict[str, Any] = {"xytext": (-4, 5 + 13 * rank), "textcoords": "offset points", "ha": "right"}
            axes.annotate(f"{x:.3g} {unit}", (x, foot), color=colour, fontsize=9.5, fontweight="bold", **offset)
    axes.set_ylim(bottom=foot)
    return level


def describe_lines(named: Sequence[Line]) -> str:
    """Return a sentence on the lines and bands of the coloured arms."""
    several = [line for line in named if len(line.scores) > 1]
    single = [line for line in named if len(line.scores) == 1]
    parts = []
    if several:
        some = f", at most {MOST_RUNS} of an arm" if any(len(line.scores) > MOST_RUNS for line in several) else ""
        parts.append(f"Thin lines are runs{some}, thick lines are their means")
    if single:
        parts.append("an arm of one run is its line" if several else "Each line is one run")
    if len(named) <= CROWD:
        if any(line.band for line in several):
            parts.append("bands are 1.96 standard errors over runs")
        if any(line.band for line in single):
            bands = "its band is" if several else "bands are"
            parts.append(f"{bands} 1.96 standard errors of the evaluation over its prompts, not over runs")
    text = ", ".join(parts) + ("; a checkpoint’s time is the mean of its real seconds" if several else "")
    return f"{text}." if text else ""


def describe_others(lines: Sequence[Line]) -> str:
    """The grey lines of a figure by name, and those that its axis does not hold."""
    means = {line.label: mean_curve(line.scores) for line in lines if line.role == "other"}
    if not means:
        return ""
    low, high = _limits(lines)
    outside = [label for label, mean in means.items() if ((mean < low) | (mean > high)).any()]
    note = f" Grey, means only: {names([*means])}."
    return note + (f" Partly or wholly outside the axis: {names(outside)}." if outside else "")
