"""Figures for print: one column of a paper wide, fonts embedded, a dash for each arm so that grey is enough."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .analysis import Analysis
from .charts import Panel, Style
from .text import plain

WIDTH = 3.25  # inches: a column of a paper with two columns
_VARYING = {"svg": "Date", "pdf": "CreationDate", "png": "Software"}  # what would change a file's bytes
_DPI = 300  # of a PNG, and of images within an SVG or a PDF
_INK = "#3c4043"
_PRINTED_DASHES = ((), (6, 2), (1, 1.2), (6, 1.5, 1, 1.5), (3, 1), (6, 1.5, 1, 1.5, 1, 1.5))

STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ea",
    "axes.edgecolor": "#8a9099",
    "lines.linewidth": 1.5,
    "text.parse_math": False,  # names may hold dollar signs
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # TrueType fonts: publishers refuse Type 3
    "svg.hashsalt": "pods",  # the same figure gives the same bytes
    "legend.frameon": False,
}


def printed(analysis: Analysis, scores: Sequence[Panel], kinds: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield a file name and its content for each panel of scores, in each format."""
    figures = {}
    for panel in scores:
        name = "curves" if panel.metric == analysis.metric else panel.metric
        figures[name] = curves_figure(panel)
    for name, figure in figures.items():
        for kind in kinds:
            yield f"{name}.{kind}", to_bytes(figure, kind)


styled = mpl.rc_context(STYLE)
"""Draw in the report's style, without changing matplotlib's global settings: a decorator, or in a ``with``."""


def look(style: Style, rank: int = 0) -> dict[str, Any]:
    """Return colour and dash as matplotlib's keywords; a solid line after the first gets a dash of its own."""
    dash = style.dash or _PRINTED_DASHES[rank % len(_PRINTED_DASHES)]
    if not dash:
        return {"color": style.colour, "linestyle": "-"}
    return {"color": style.colour, "linestyle": (0, dash)}


def add_legend(figure: Figure, entries: Sequence[tuple[Any, str]]) -> None:
    """Place a legend above the axes, in as many columns as fit; the figure grows with its rows."""
    if not entries:
        return
    labels = [plain(label, 24) for _, label in entries]
    longest = max(map(len, labels)) + 8
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 17 / longest)))
    figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(labels) / columns))
    layout: dict[str, Any] = {"loc": "outside upper left", "ncols": columns, "fontsize": 7}
    legend = figure.legend([handle for handle, _ in entries], ["x"] * len(labels), **layout)
    for entry, label in zip(legend.get_texts(), labels, strict=True):
        entry.set_text(label)  # set afterwards: matplotlib skips a label that starts with "_"


def to_bytes(figure: Figure, kind: str) -> bytes:
    """Return the figure in a format, the same bytes each time."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata={_VARYING[kind]: None})
    return buffer.getvalue()


@styled
def curves_figure(panel: Panel) -> Figure:
    """A metric over training time: runs thin, their mean thick with its band, and the level."""
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    axes = figure.add_subplot()
    entries = []
    bands = []
    for rank, arm in enumerate(panel.arms):
        line = arm.lines["time"]
        assert line.mean is not None  # over the first axis
        if not panel.crowded:
            for _, times, scores in line.seeds or ():
                _plot(axes, times, scores, color=arm.colour, linewidth=0.5, alpha=0.3, zorder=2.2)
            x, low, high = (np.array(values, dtype=float) for values in (line.x, line.low, line.high))
            bands.append((x, low, high, arm.colour))
        handle = _plot(axes, line.x, line.mean, zorder=3, **look(Style(arm.colour, arm.dash), rank))
        entries.append((handle, arm.label))
    if panel.level:
        level, label = panel.level
        handle = axes.axhline(level, color=_INK, linewidth=0.7, linestyle=(0, (4, 3)), zorder=2.5)
        entries.append((handle, label))
    bottom, top = axes.get_ylim()  # of the lines: a wide interval must not make them flat
    for x, low, high, colour in bands:
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2.4)
    if panel.bounds:
        bottom = max(bottom, panel.bounds[0])
        top = min(top, panel.bounds[1])
    axes.set_ylim(bottom, top)
    axes.set_xlim(left=0)
    axes.set_xlabel(panel.x[0][1])
    axes.set_ylabel(panel.y)
    add_legend(figure, entries)
    return figure


def _plot(axes: Axes, x: Sequence[float | None], y: Sequence[float | None], **keywords: Any) -> Any:
    """Draw a line through its known points; a lone point is a dot."""
    points = np.array([x, y], dtype=float)
    points = points[:, ~np.isnan(points).any(axis=0)]
    marker = "." if points.shape[1] == 1 else None
    return axes.plot(*points, marker=marker, **keywords)[0]
