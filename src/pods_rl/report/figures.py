"""Figures: functions take arrays and return matplotlib Figures; no global state is touched."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .statistics import Array, mean_curve, normal_band
from .text import UNITS, plain, unit_for

# Okabe and Ito's palette without its yellow, which is lost on white; the baseline is grey
BASELINE_COLOUR = "#5f6368"
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":")
CROWD = 4  # arms beyond which bands and times lie over each other
WIDE, NARROW = 8.4, 4.4  # inches: a desktop page or a README, and a phone
PHASE_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#c8ccd0")

_STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ea",
    "axes.edgecolor": "#8a9099",
    "text.parse_math": False,  # names may hold dollar signs
    "svg.fonttype": "path",
    "svg.hashsalt": "pods",  # the same figure gives the same bytes
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Line:
    """One arm of a figure over training time: R runs, C checkpoints, seconds."""

    label: str
    seconds: Array  # [R, C]
    scores: Array  # [R, C]
    is_baseline: bool = False
    crossing: float = math.inf  # seconds; inf: none to mark


@dataclass(frozen=True)
class Bar:
    """One arm of the time-to-threshold figure."""

    label: str
    seconds: float  # inf: never
    text: str
    is_baseline: bool = False


@dataclass(frozen=True)
class Series:
    """One arm's logged metrics over steps: for each metric, one (steps, values) pair a run."""

    label: str
    values: dict[str, list[tuple[Array, Array]]] = field(default_factory=dict)
    is_baseline: bool = False


def _styled(make: Callable[..., Figure]) -> Callable[..., Figure]:
    @wraps(make)
    def draw(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context(_STYLE):
            return make(*args, **kwargs)

    return draw


def line_styles(baselines: Sequence[bool]) -> list[dict[str, Any]]:
    """Colour and dash for each arm: grey for the baseline, the palette in order for the rest.

    >>> [style["color"] for style in line_styles([True, False])]
    ['#5f6368', '#D55E00']
    """
    styles, used = [], 0
    for is_baseline in baselines:
        if is_baseline:
            styles.append({"color": BASELINE_COLOUR, "linestyle": "-"})
            continue
        dash = LINES[(used // len(COLOURS)) % len(LINES)]
        styles.append({"color": COLOURS[used % len(COLOURS)], "linestyle": dash})
        used += 1
    return styles


@_styled
def curves_figure(
    lines: Sequence[Line],
    *,
    metric: str = "accuracy",
    threshold: float | None = None,
    threshold_label: str = "",
    width: float = WIDE,
) -> Figure:
    """Score against training time: every run thin, the mean thick with its 95 % band, crossings marked.

    Args:
        lines: at least one arm; a run's NaN checkpoints are passed over.
        metric: for the axis.
        threshold: a score to draw as a dashed line; each line's ``crossing`` is marked on it.
        threshold_label: written along that line.
        width: inches.

    Above four arms, bands are left out, as they hide each other, and the axis holds the means, not every run.
    """
    figure = _figure(width, 4.2 if width == WIDE else 4.0)
    axes = figure.add_subplot()
    longest = max((float(np.nanmax(line.seconds)) for line in lines), default=1.0)
    unit = unit_for(longest)
    handles = []
    styles = line_styles([line.is_baseline for line in lines])
    for rank, (line, style) in enumerate(zip(lines, styles, strict=True)):
        handles.append(_draw_line(axes, line, style, UNITS[unit], crowded=len(lines) > CROWD, layer=3 + 0.1 * rank))
    axes.set_ylim(*_mean_limits(lines, threshold) if len(lines) > CROWD else axes.get_ylim())
    if threshold is not None and math.isfinite(threshold):
        _mark_threshold(axes, lines, [style["color"] for style in styles], threshold, unit)
        offset: dict[str, Any] = {"xytext": (6, 4), "textcoords": "offset points"}
        axes.annotate(
            threshold_label,
            (0, threshold),
            xycoords=("axes fraction", "data"),
            fontsize=9,
            zorder=7,
            **offset,
        )
    axes.set_xlabel(f"training time ({unit})")
    axes.set_ylabel(metric)
    axes.set_xlim(0, longest / UNITS[unit] * 1.02 or 1)
    _legend(figure, handles, [line.label for line in lines], width)
    return figure


def _draw_line(axes: Axes, line: Line, style: dict[str, Any], unit: float, *, crowded: bool, layer: float) -> Any:
    time_C, mean_C = mean_curve(line.seconds) / unit, mean_curve(line.scores)
    faint = 0.1 if crowded else 0.28
    for seconds_C, scores_C in zip(line.seconds, line.scores, strict=True):
        known = ~np.isnan(scores_C)
        look = {**style, "marker": "." if known.sum() == 1 else None, "alpha": faint, "linewidth": 0.8}
        axes.plot(seconds_C[known] / unit, scores_C[known], zorder=2, **look)
    known = ~np.isnan(mean_C)
    if not crowded and len(line.scores) > 1:
        low_C, high_C = normal_band(line.scores)
        look = {"color": style["color"], "alpha": 0.17, "linewidth": 0}
        axes.fill_between(time_C[known], low_C[known], high_C[known], zorder=2.2, **look)
    (handle,) = axes.plot(time_C[known], mean_C[known], linewidth=2.4, zorder=layer, **style)
    return handle


def _mean_limits(lines: Sequence[Line], threshold: float | None) -> tuple[float, float]:
    level = [math.nan if threshold is None else threshold]
    means = np.concatenate([level, *(mean_curve(line.scores) for line in lines)])
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    margin = 0.08 * (high - low) or 0.05
    return low - margin, high + margin


def _mark_threshold(axes: Axes, lines: Sequence[Line], colours: Sequence[str], threshold: float, unit: str) -> None:
    """The dashed line, and for each arm that crosses it a dot, a drop line and the time at its foot."""
    axes.axhline(threshold, color="#3c4043", linewidth=1, linestyle=(0, (4, 3)), zorder=2.5)
    foot = axes.get_ylim()[0]
    named = len(lines) <= CROWD  # the times of more arms would lie over each other
    for rank, (line, colour) in enumerate(zip(lines, colours, strict=True)):
        if not math.isfinite(line.crossing):
            continue
        x = line.crossing / UNITS[unit]
        axes.plot([x, x], [foot, threshold], ":", color=colour, linewidth=1.2, zorder=2.6)
        axes.plot([x], [threshold], "o", color=colour, markeredgecolor="white", markersize=7, zorder=6)
        if named:
            offset: dict[str, Any] = {
                "xytext": (-4, 5 + 13 * rank),
                "textcoords": "offset points",
                "ha": "right",
            }
            axes.annotate(f"{x:.3g} {unit}", (x, foot), color=colour, fontsize=9.5, fontweight="bold", **offset)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], width: float) -> None:
    """Above the axes, in as many columns as the longest label leaves room for; the figure grows with its rows."""
    labels = [_short(label, width, 40) for label in labels]
    columns = max(1, min(len(labels), int(width * 12 / (6 + max(map(len, labels), default=0)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * (math.ceil(len(labels) / columns) - 1))
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns, "fontsize": 9.5}
    legend = figure.legend(handles, ["x"] * len(handles), **place)
    for entry, label in zip(legend.get_texts(), labels, strict=True):
        entry.set_text(label)  # set afterwards: a label that starts with "_" would be left out


@_styled
def threshold_figure(bars: Sequence[Bar], *, horizon: float, title: str = "", width: float = WIDE) -> Figure:
    """Time to the threshold for each arm; one that never gets there is hatched up to ``horizon`` (seconds)."""
    figure = _figure(width, 0.9 + 0.42 * len(bars))
    axes = figure.add_subplot()
    longest = max([horizon, *(bar.seconds for bar in bars if math.isfinite(bar.seconds))]) or 1.0
    unit = unit_for(longest)
    styles = line_styles([bar.is_baseline for bar in bars])
    for y, (bar, style) in enumerate(zip(bars, styles, strict=True)):
        never = not math.isfinite(bar.seconds)
        length = (horizon if never else bar.seconds) / UNITS[unit]
        look = {"facecolor": "none", "hatch": "///"} if never else {"facecolor": style["color"]}
        axes.barh(y, length, height=0.62, edgecolor="#c8ccd0" if never else style["color"], **look)
        offset: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points"}
        axes.annotate(bar.text, (length, y), va="center", fontsize=9.5, **offset)
    _name_rows(axes, [bar.label for bar in bars], width)
    axes.set_xlim(0, longest / UNITS[unit] * (1.35 if width == WIDE else 1.9))
    axes.set_xlabel(f"{title} ({unit})" if title else unit)
    return figure


@_styled
def phases_figure(labels: Sequence[str], phases: Sequence[str], seconds: Array, *, width: float = WIDE) -> Figure:
    """Seconds of a step by phase, a stacked bar for each arm.

    Args:
        labels: of the A arms.
        phases: of the K phases.
        seconds: ``[A, K]``; NaN (not logged) draws nothing.
        width: inches.
    """
    figure = _figure(width, 1.3 + 0.42 * len(labels))
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
    _name_rows(axes, labels, width)
    axes.set_xlabel("seconds a step")
    _legend(figure, bars, phases, width)
    return figure


def _short(label: str, width: float, limit: int) -> str:
    return plain(label, limit if width == WIDE else limit // 2)


def _name_rows(axes: Axes, labels: Sequence[str], width: float) -> None:
    axes.set_yticks(range(len(labels)), [_short(label, width, 30) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


@_styled
def steps_figure(series: Sequence[Series], titles: dict[str, str], *, bins: int = 120, width: float = WIDE) -> Figure:
    """Logged metrics over steps, a panel each: the mean over runs, in at most ``bins`` stretches of steps.

    Args:
        series: an entry for each arm.
        titles: metric to panel title, in order; a metric that no arm logged has no panel.
        bins: at most this many points a line.
        width: inches; a narrow figure has one column of panels.
    """
    shown = [metric for metric in titles if any(s.values.get(metric) for s in series)]
    columns = 2 if width == WIDE else 1
    rows = max(1, math.ceil(len(shown) / columns))
    figure = _figure(width, 0.4 + 2.1 * rows)
    styles = line_styles([arm.is_baseline for arm in series])
    handles: dict[int, Any] = {}
    for panel, metric in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, panel)
        axes.set_title(titles[metric], fontsize=10.5, loc="left")
        for index, arm in enumerate(series):
            if arm.values.get(metric):
                steps, values = binned(arm.values[metric], bins)
                (handles[index],) = axes.plot(steps, values, linewidth=1.4, **styles[index])
        axes.set_xlabel("step", fontsize=9.5)
        axes.margins(x=0.01)
    if handles:
        _legend(figure, list(handles.values()), [series[index].label for index in handles], width)
    return figure


def binned(runs: Sequence[tuple[Array, Array]], bins: int) -> tuple[Array, Array]:
    """Mean of several runs' values within equal stretches of steps; stretches without a value are left out.

    >>> steps, values = binned([(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 5.0, 7.0]))], bins=2)
    >>> steps, values
    (array([1.5, 3.5]), array([2., 6.]))
    """
    steps = np.concatenate([steps for steps, _ in runs])
    values = np.concatenate([values for _, values in runs])
    low, high = float(steps.min()), float(steps.max())
    width = (high - low) / bins or 1.0
    place = np.minimum(((steps - low) / width).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    used = count > 0
    mean_step = np.bincount(place, steps, minlength=bins)[used] / count[used]
    return mean_step, np.bincount(place, values, minlength=bins)[used] / count[used]


def to_bytes(figure: Figure, kind: str, dpi: int = 180) -> bytes:
    """The figure as ``svg`` or ``png``, the same bytes each time."""
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()
