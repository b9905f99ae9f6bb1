"""Figures over training time and of times: functions take arrays and return matplotlib Figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .statistics import Z_95, Array, mean_curve, normal_band
from .style import TEXT, WIDE, Role, add_legend, line_styles, name_rows, new_figure, short, styled
from .text import UNITS, unit_for

CROWD = 6  # arms beyond which bands, runs and times lie over each other
MOST_RUNS = 60  # of an arm, drawn thin
MOST_BARS = 40  # arms of a figure of bars
_POINTS_A_RUN = 500
_POINTS = 4000  # beyond which the thin lines are drawn as an image, to keep an SVG small
PHASE_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#c8ccd0")


@dataclass(frozen=True)
class Line:
    """One arm of a figure over training time: R runs, C checkpoints, seconds."""

    label: str
    seconds: Array  # [R, C]
    scores: Array  # [R, C]
    role: Role = "arm"
    crossing: float = math.inf  # seconds; inf: none to mark
    errors: Array | None = None  # [R, C] standard errors of the evaluations, drawn where there is one run


@dataclass(frozen=True)
class Bar:
    """One arm of the time-to-threshold figure."""

    label: str
    seconds: float  # inf: never
    text: str
    role: Role = "arm"


@dataclass(frozen=True)
class Final:
    """One value of an ablation: the final score of its arm, and that of each run."""

    label: str
    mean: float
    low: float  # NaN: no interval
    high: float
    runs: Array = field(default_factory=lambda: np.empty(0))
    role: Role = "arm"


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

    A run that stands alone has the band of its evaluations' standard errors.

    Args:
        lines: at least one arm; a run's NaN checkpoints are passed over. An ``other`` arm is a thin grey mean, and
            all of them share an entry of the legend.
        metric: for the axis.
        threshold: a score to draw as a dashed line; each line's ``crossing`` is marked on it.
        threshold_label: of that line, in the legend.
        width: inches.

    Above ``CROWD`` arms, bands are left out, as they hide each other, and the axis holds the means, not every run.
    """
    figure = new_figure(width, 4.2 if width == WIDE else 4.0)
    axes = figure.add_subplot()
    unit = unit_for(_longest(lines))
    handles = draw_lines(axes, lines, unit)
    shown, labels = _entries(lines, handles)
    if threshold is not None and math.isfinite(threshold):
        shown.append(_mark_threshold(axes, lines, threshold, unit))
        labels.append(threshold_label)
    axes.set_ylabel(metric)
    add_legend(figure, shown, labels, width)
    return figure


@styled
def ablation_figure(lines: Sequence[Line], finals: Sequence[Final], *, metric: str, width: float = WIDE) -> Figure:
    """One setting varied: the arms' curves, and their final scores with 95 % interval and every run.

    Args:
        lines: an arm for each value of the setting, in order; its label is the value.
        finals: the same arms' final scores.
        metric: for the axes.
        width: inches; a narrow figure has its panels below each other.
    """
    wide = width == WIDE
    figure = new_figure(width, 3.7 if wide else 6.2)
    layout: dict[str, Any] = {"width_ratios": [1.65, 1]} if wide else {"height_ratios": [1.35, 1]}
    left, right = figure.subplots(*((1, 2) if wide else (2, 1)), gridspec_kw=layout)
    handles = draw_lines(left, lines, unit_for(_longest(lines)))
    left.set_ylabel(metric)
    for x, (final, style) in enumerate(zip(finals, line_styles([final.role for final in finals]), strict=True)):
        colour = style["color"]
        dots = final.runs[:: math.ceil(len(final.runs) / 200) or 1]
        right.plot(np.full(len(dots), x - 0.2), dots, "o", color=colour, alpha=0.45, markersize=4, mew=0)
        spread = [[final.mean - final.low], [final.high - final.mean]]
        error = None if math.isnan(final.low) else spread
        look: dict[str, Any] = {"capsize": 4, "elinewidth": 1.8, "markersize": 7, "zorder": 3}
        right.errorbar([x], [final.mean], yerr=error, fmt="o", color=colour, **look)
    names = [short(final.label, WIDE, 16).replace(" (", "\n(") for final in finals]
    right.set_xticks(range(len(finals)), names, fontsize=9)
    if sum(map(len, names)) > 34:
        right.tick_params(axis="x", labelrotation=20)
    right.set_xlim(-0.5, len(finals) - 0.5)
    right.set_title(f"final {metric}", fontsize=10.5, loc="left")
    right.grid(visible=False, axis="x")
    add_legend(figure, *_entries(lines, handles), width)
    return figure


def _longest(lines: Sequence[Line]) -> float:
    return max((float(np.nanmax(line.seconds)) for line in _named(lines)), default=1.0)


def _named(lines: Sequence[Line]) -> Sequence[Line]:
    """The arms that decide the axes: all but the grey ones, where there are such."""
    return [line for line in lines if line.role != "other"] or lines


def _entries(lines: Sequence[Line], handles: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """The legend's: an entry for each arm, and one for all the others."""
    shown = [(handle, line.label) for handle, line in zip(handles, lines, strict=True) if line.role != "other"]
    others = [handle for handle, line in zip(handles, lines, strict=True) if line.role == "other"]
    if others:
        shown.append((others[0], f"{len(others)} other arm{'' if len(others) == 1 else 's'}"))
    return [handle for handle, _ in shown], [label for _, label in shown]


def draw_lines(axes: Axes, lines: Sequence[Line], unit: str) -> list[Any]:
    """Draw arms over time, and the limits and name of both axes; the handles of their mean lines."""
    crowded = sum(line.role != "other" for line in lines) > CROWD
    points = sum(line.scores.size for line in lines if line.role != "other")
    handles = []
    for rank, (line, style) in enumerate(zip(lines, line_styles([line.role for line in lines]), strict=True)):
        layer = 2.1 if line.role == "other" else 3.9 if line.role == "reference" else 3 + 0.1 * min(rank, 8)
        look = {**style, "zorder": layer}
        handles.append(_draw_line(axes, line, look, UNITS[unit], crowded=crowded, rasterized=points > _POINTS))
    if crowded or len(_named(lines)) < len(lines):
        axes.set_ylim(*limits(lines, means_only=crowded))
    axes.set_xlim(0, _longest(lines) / UNITS[unit] * 1.02 or 1)
    axes.set_xlabel(f"training time ({unit})")
    return handles


def _draw_line(axes: Axes, line: Line, style: dict[str, Any], unit: float, *, crowded: bool, rasterized: bool) -> Any:
    time_C, mean_C = mean_curve(line.seconds) / unit, mean_curve(line.scores)
    known = ~np.isnan(mean_C)
    if line.role == "other":
        (handle,) = axes.plot(time_C[known], mean_C[known], linewidth=1.2, **style)
        return handle
    for run in drawn_runs(line):
        seconds_C, scores_C = line.seconds[run], line.scores[run]
        there = np.flatnonzero(~np.isnan(scores_C))
        there = there[:: math.ceil(len(there) / _POINTS_A_RUN)] if len(there) > _POINTS_A_RUN else there
        look = {**style, "marker": "." if len(there) == 1 else None, "alpha": 0.1 if crowded else 0.28}
        look |= {"linewidth": 0.8, "rasterized": rasterized, "zorder": 2.2}
        axes.plot(seconds_C[there] / unit, scores_C[there], **look)
    band = band_of(line)
    if not crowded and band:
        low_C, high_C = band
        look = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
        axes.fill_between(time_C[known], low_C[known], high_C[known], zorder=2.4, **look)
    marker = "." if known.sum() == 1 else None
    (handle,) = axes.plot(time_C[known], mean_C[known], linewidth=2.3, marker=marker, **style)
    return handle


def drawn_runs(line: Line) -> list[int]:
    """The runs that a figure draws thin: none beside their own mean, at most ``MOST_RUNS``, evenly chosen."""
    runs = len(line.scores)
    if runs == 1:
        return []
    return list(range(runs)) if runs <= MOST_RUNS else np.linspace(0, runs - 1, MOST_RUNS).round().astype(int).tolist()


def band_of(line: Line) -> tuple[Array, Array] | None:
    """1.96 standard errors about the mean: over runs, or of the evaluation where there is one run; else None."""
    if len(line.scores) > 1:
        return normal_band(line.scores)
    if line.errors is None or np.isnan(line.errors).all():
        return None
    return line.scores[0] - Z_95 * line.errors[0], line.scores[0] + Z_95 * line.errors[0]


def limits(lines: Sequence[Line], *, means_only: bool = False) -> tuple[float, float]:
    """The range of scores that holds every run of the named arms, or their means, with a margin."""
    shown = [mean_curve(line.scores) if means_only else line.scores.ravel() for line in _named(lines)]
    values = np.concatenate(shown)
    if np.isnan(values).all():
        return 0.0, 1.0
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.08 * (high - low) or 0.05
    return low - margin, high + margin


def _mark_threshold(axes: Axes, lines: Sequence[Line], threshold: float, unit: str) -> Any:
    """The dashed line, and for each arm that crosses it a dot, a drop line and the time at its foot; its handle."""
    level = axes.axhline(threshold, color=TEXT, linewidth=1, linestyle=(0, (4, 3)), zorder=2.5)
    foot = axes.get_ylim()[0]
    crossing = [
        (line, style["color"])
        for line, style in zip(lines, line_styles([line.role for line in lines]), strict=True)
        if math.isfinite(line.crossing) and line.role != "other"
    ]
    for rank, (line, colour) in enumerate(crossing):
        x = line.crossing / UNITS[unit]
        axes.plot([x, x], [foot, threshold], ":", color=colour, linewidth=1.2, zorder=2.6)
        axes.plot([x], [threshold], "o", color=colour, markeredgecolor="white", markersize=7, zorder=6)
        if len(crossing) <= CROWD:  # the times of more arms would lie over each other
            offset: dict[str, Any] = {"xytext": (-4, 5 + 13 * rank), "textcoords": "offset points", "ha": "right"}
            axes.annotate(f"{x:.3g} {unit}", (x, foot), color=colour, fontsize=9.5, fontweight="bold", **offset)
    axes.set_ylim(bottom=foot)
    return level


@styled
def threshold_figure(bars: Sequence[Bar], *, horizon: float, title: str = "", width: float = WIDE) -> Figure:
    """Time to the threshold for each arm; one that never gets there is hatched up to ``horizon`` (seconds)."""
    figure = new_figure(width, 0.9 + (0.42 if len(bars) <= CROWD else 0.32) * len(bars))
    axes = figure.add_subplot()
    longest = max([horizon, *(bar.seconds for bar in bars if math.isfinite(bar.seconds))]) or 1.0
    unit = unit_for(longest)
    styles = line_styles([bar.role for bar in bars])
    for y, (bar, style) in enumerate(zip(bars, styles, strict=True)):
        never = not math.isfinite(bar.seconds)
        length = (horizon if never else bar.seconds) / UNITS[unit]
        look = {"facecolor": "none", "hatch": "///"} if never else {"facecolor": style["color"]}
        axes.barh(y, length, height=0.62, edgecolor="#c8ccd0" if never else style["color"], **look)
        offset: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points"}
        axes.annotate(bar.text, (length, y), va="center", fontsize=9.5, **offset)
    name_rows(axes, [bar.label for bar in bars], width)
    axes.set_xlim(0, longest / UNITS[unit] * (1.35 if width == WIDE else 1.9))
    axes.set_xlabel(f"{title} ({unit})" if title else unit)
    return figure


@styled
def phases_figure(labels: Sequence[str], phases: Sequence[str], seconds: Array, *, width: float = WIDE) -> Figure:
    """Seconds of a step by phase, a stacked bar for each arm.

    Args:
        labels: of the A arms.
        phases: of the K phases.
        seconds: ``[A, K]``; NaN (not logged) draws nothing.
        width: inches.
    """
    figure = new_figure(width, 1.3 + (0.42 if len(labels) <= CROWD else 0.32) * len(labels))
    axes = figure.add_subplot()
    left = np.zeros(len(labels))
    total = float(np.nansum(seconds, axis=1).max(initial=0.0))
    bars = []
    for phase, values, colour in zip(phases, np.nan_to_num(seconds).T, PHASE_COLOURS, strict=False):
        bars.append(axes.barh(range(len(labels)), values, left=left, height=0.62, color=colour))
        texts = [f"{value:.2g}" if value > (0.06 if width == WIDE else 0.12) * total else "" for value in values]
        ink = "#202124" if phase == "other" else "white"
        axes.bar_label(bars[-1], texts, label_type="center", fontsize=9, color=ink)
        left += values
    name_rows(axes, labels, width)
    axes.set_xlabel("seconds a step")
    add_legend(figure, bars, phases, width)
    return figure
