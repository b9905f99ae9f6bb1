"""Figures for print: one column of a paper wide, fonts embedded, a dash for each arm so that grey is enough."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .ablations import AXES, Ablation
from .analysis import Analysis
from .arms import Arm
from .charts import CROWD, Style, band_of, crossing_of, styles_of
from .curves import ACCURACIES, LENGTH, Curve
from .text import UNITS, plain, unit_for, words

WIDTH = 3.25  # inches: a column of a paper with two columns
MOST_RUNS = 60  # of an arm, drawn thin
_DPI = 300
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


def printed(analysis: Analysis, kinds: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield a file name and its content for each figure that has data, in each format."""
    for name, draw in figures(analysis).items():
        figure = draw()
        for kind in kinds:
            yield f"{name}.{kind}", to_bytes(figure, kind)


def figures(analysis: Analysis) -> dict[str, Callable[[], Figure]]:
    """Return what draws each figure that has data, by name."""
    measured = {name for arm in analysis.arms for name in arm.curves(analysis.metric)} - {analysis.metric}
    found: dict[str, Callable[[], Figure]] = {"curves": partial(curves_figure, analysis, analysis.metric)}
    found |= {name: partial(curves_figure, analysis, name) for name in (*ACCURACIES, LENGTH) if name in measured}
    found |= {f"ablation-{one.axis}": partial(ablation_figure, analysis, one) for one in analysis.ablations}
    return found


# ------------------------------------------------------------------------------------ shared by all figures


def styled(make: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the report's style, without changing matplotlib's global settings."""

    @wraps(make)
    def draw(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context(STYLE):
            return make(*args, **kwargs)

    return draw


def new_figure(width: float = WIDTH, height: float = 2.4) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def look(style: Style, rank: int = 0) -> dict[str, Any]:
    """Return colour and dash as matplotlib's keywords; a solid line after the first gets a dash of its own."""
    dash = style.dash or _PRINTED_DASHES[rank % len(_PRINTED_DASHES)]
    return {"color": style.colour, "linestyle": (0, dash) if dash else "-"}


def add_legend(figure: Figure, entries: Sequence[tuple[Any, str]]) -> None:
    """Place a legend above the axes, in as many columns as fit; the figure grows with its rows."""
    if not entries:
        return
    labels = [plain(label, 24) for _, label in entries]
    longest = max(map(len, labels)) + 8
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 17 / longest)))
    figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(labels) / columns))
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns, "fontsize": 7}
    legend = figure.legend([handle for handle, _ in entries], ["x"] * len(labels), **place)
    for entry, label in zip(legend.get_texts(), labels, strict=True):
        entry.set_text(label)  # set afterwards: matplotlib skips a label that starts with "_"


def to_bytes(figure: Figure, kind: str, dpi: int = _DPI) -> bytes:
    """Return the figure in a format, the same bytes each time; ``dpi`` also sets images within an SVG or a PDF."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        figure.set_dpi(dpi)
        if kind == "svg":
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
        elif kind == "pdf":
            FigureCanvasPdf(figure).print_pdf(buffer, metadata={"CreationDate": None})
        else:
            FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


# ----------------------------------------------------------------------------------- over training time


@styled
def curves_figure(analysis: Analysis, metric: str) -> Figure:
    """A metric over training time: runs thin, their mean thick with its band, and where means reach the level."""
    figure = new_figure()
    axes = figure.add_subplot()
    arms = [arm for arm in analysis.arms if metric in arm.curves(analysis.metric)]
    entries = _draw_curves(axes, analysis, arms, metric)
    axes.set_ylabel(words(metric))
    base = analysis.baseline if metric == analysis.metric else None
    result = analysis.speedup_of(base.name) if base else None
    if base and result and math.isfinite(result.threshold):
        level = axes.axhline(result.threshold, color=_INK, linewidth=0.7, linestyle=(0, (4, 3)), zorder=2.5)
        entries.append((level, f"99 % of {base.label}’s peak"))
    add_legend(figure, entries)
    return figure


def _draw_curves(axes: Axes, analysis: Analysis, arms: Sequence[Arm], metric: str) -> list[tuple[Any, str]]:
    """Draw arms over time; return an entry of the legend for each."""
    curves = [arm.curves(analysis.metric)[metric] for arm in arms]
    longest = max((float(np.nanmax(curve.seconds)) for curve in curves), default=1.0)
    unit = UNITS[unit_for(longest)]
    styles = styles_of(analysis)
    entries = []
    for rank, (arm, curve) in enumerate(zip(arms, curves, strict=True)):
        handle = _draw_curve(axes, curve, unit, crowded=len(arms) > CROWD, **look(styles[arm.name], rank))
        entries.append((handle, arm.label))
        if found := crossing_of(analysis, metric, arm):
            axes.plot([found[0] / unit], [found[1]], "o", color=styles[arm.name].colour, mec="white", ms=5, zorder=6)
    axes.set_xlim(0, longest / unit * 1.02 or 1)
    of_cpu = " of processor time" if any(arm.config.get("clock") == "cpu" for arm in arms) else ""
    axes.set_xlabel(f"training time ({unit_for(longest)}{of_cpu})")
    return entries


def _draw_curve(axes: Axes, curve: Curve, unit: float, *, crowded: bool, **keywords: Any) -> Any:
    times, known, colour = curve.times / unit, ~np.isnan(curve.mean), keywords["color"]
    count = len(curve.runs)
    for run in (
        np.linspace(0, count - 1, min(count, MOST_RUNS)).round().astype(int) if count > 1 and not crowded else ()
    ):
        there = ~np.isnan(curve.scores[run])
        x, y = curve.seconds[run][there] / unit, curve.scores[run][there]
        axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3, zorder=2.2, rasterized=y.size > 500)
    if not crowded and (band := band_of(curve)):
        low, high = (edge[known] for edge in band)
        axes.fill_between(times[known], low, high, color=colour, alpha=0.15, linewidth=0, zorder=2.4)
    marker = "." if known.sum() == 1 else None
    return axes.plot(times[known], curve.mean[known], marker=marker, zorder=3, **keywords)[0]


@styled
def ablation_figure(analysis: Analysis, ablation: Ablation) -> Figure:
    """One setting varied: the final scores with 95 % interval and every run."""
    figure = new_figure()
    axes = figure.add_subplot()
    pairs = zip(ablation.arms, ablation.values, strict=True)
    shown = [(arm, value, arm.curve) for arm, value in pairs if arm.curve and arm.name in analysis.finals]
    for x, (arm, _, curve) in enumerate(shown):
        final, colour = analysis.finals[arm.name], styles_of(analysis)[arm.name].colour
        scores = curve.scores[:, curve.last(analysis.horizon)][:MOST_RUNS]
        axes.plot(np.full(len(scores), x - 0.2), scores, "o", color=colour, alpha=0.45, markersize=3, mew=0)
        error = None if math.isnan(final.low) else [[final.final - final.low], [final.high - final.final]]
        axes.errorbar([x], [final.final], yerr=error, fmt="o", color=colour, capsize=3, markersize=5, zorder=3)
    axes.set_xticks(range(len(shown)), [plain(value, 16).replace(" (", "\n(") for _, value, _ in shown])
    axes.set_xlim(-0.5, max(len(shown), 1) - 0.5)
    axes.set_xlabel(AXES[ablation.axis])
    axes.set_ylabel(f"final {words(analysis.metric)}")
    axes.grid(visible=False, axis="x")
    return figure
