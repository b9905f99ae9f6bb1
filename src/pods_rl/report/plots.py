"""Figures of arrays, and the look that all of them share: palette, legend, bytes. No global state is touched."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .statistics import Array
from .text import UNITS, plain, unit_for

Role = Literal["baseline", "reference", "arm", "other"]
"""What an arm is in a figure: the baseline, the arm that ablations vary, one of the rest, or one drawn faintly."""

CROWD = 6  # with more arms, bands, runs and times overlap
MOST_BARS = 40  # arms of a figure of bars
WIDE, NARROW = 8.4, 4.4  # inches: a desktop page or a README, and a phone
KINDS = ("pdf", "svg", "png")

# Okabe and Ito's palette without its yellow, which is invisible on white; the baseline is grey
BASELINE_COLOUR, REFERENCE_COLOUR, OTHER_COLOUR = "#5f6368", "#D55E00", "#bcc2c9"
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PHASE_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#c8ccd0")
LINES = ("-", "--", ":")

STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ea",
    "axes.edgecolor": "#8a9099",
    "text.parse_math": False,  # names may hold dollar signs
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # whole TrueType fonts: publishers refuse Type 3
    "svg.hashsalt": "pods",  # the same figure gives the same bytes
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Bar:
    """One arm of the time-to-threshold figure."""

    label: str
    seconds: float  # inf: never
    text: str
    role: Role = "arm"


@dataclass(frozen=True)
class Dot:
    """One setting of a plan."""

    label: str
    seconds: float  # modelled
    signal: float
    timed: float | None = None  # seconds
    role: Role = "arm"


@dataclass(frozen=True)
class Series:
    """One arm's logged metrics over steps: for each metric, one (steps, values) pair a run."""

    label: str
    values: dict[str, list[tuple[Array, Array]]] = field(default_factory=dict)
    role: Role = "arm"


def styled(make: Callable[..., Figure]) -> Callable[..., Figure]:
    @wraps(make)
    def draw(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context(STYLE):
            return make(*args, **kwargs)

    return draw


def line_styles(roles: Sequence[Role]) -> list[dict[str, Any]]:
    """Colour and dash for each arm: the palette in order, except for roles with a colour of their own.

    Without a reference the first arm takes its colour.

    >>> [style["color"] for style in line_styles(["baseline", "arm", "arm", "other"])]
    ['#5f6368', '#D55E00', '#0072B2', '#bcc2c9']
    """
    own = {"baseline": BASELINE_COLOUR, "reference": REFERENCE_COLOUR, "other": OTHER_COLOUR}
    palette = COLOURS if "reference" in roles else (REFERENCE_COLOUR, *COLOURS)
    styles, used = [], 0
    for role in roles:
        if role in own:
            styles.append({"color": own[role], "linestyle": "-"})
            continue
        dash = LINES[(used // len(palette)) % len(LINES)]
        styles.append({"color": palette[used % len(palette)], "linestyle": dash})
        used += 1
    return styles


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_legend(figure: Figure, entries: Sequence[tuple[Any, str]], width: float) -> None:
    """Above the axes, in as many columns as fit; the figure grows with its rows."""
    if not entries:
        return
    labels = [plain(label, 40 if width == WIDE else 20) for _, label in entries]
    columns = next(count for count in range(len(labels), 0, -1) if count == 1 or letters(labels, count) <= width * 12)
    figure.set_figheight(figure.get_figheight() + 0.2 * (math.ceil(len(labels) / columns) - 1))
    place_legend(figure, [handle for handle, _ in entries], labels, columns, 9.5)


def place_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int, size: float) -> None:
    """Above the axes; the figure is not made higher."""
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns, "fontsize": size}
    legend = figure.legend(handles, ["x"] * len(handles), **place)
    for entry, label in zip(legend.get_texts(), labels, strict=True):
        entry.set_text(label)  # set afterwards: matplotlib skips a label that starts with "_"


def letters(labels: Sequence[str], columns: int) -> int:
    """Return a legend's width in letters: columns are filled one after the other, each as wide as its longest label."""
    return sum(6 + max(map(len, column)) for column in np.array_split(np.array(labels, dtype=object), columns))


def _bars_figure(labels: Sequence[str], height: float, width: float) -> tuple[Figure, Axes]:
    """A figure of horizontal bars with their names, the first on top."""
    figure = new_figure(width, height + (0.42 if len(labels) <= CROWD else 0.32) * len(labels))
    axes = figure.add_subplot()
    axes.set_yticks(range(len(labels)), [plain(label, 30 if width == WIDE else 15) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return figure, axes


def to_bytes(figure: Figure, kind: str, dpi: int = 180) -> bytes:
    """Return the figure in a format, the same bytes each time; ``dpi`` also sets images within an SVG or a PDF."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        if engine := figure.get_layout_engine():  # lay out once: savefig would repeat it for each file
            engine.execute(figure)
            figure.set_layout_engine("none")
        figure.set_dpi(dpi)
        if kind == "svg":
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
        elif kind == "pdf":
            FigureCanvasPdf(figure).print_pdf(buffer, metadata={"CreationDate": None})
        else:
            FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


@styled
def plan_figure(settings: Sequence[Dot], *, unit: str = "a step") -> Figure:
    """Signal against seconds of settings: modelled ones as points, timed ones in colour with a line to their model.

    The dashed line has the first timed setting's signal a second: settings above it have more.
    """
    figure = new_figure(WIDE, 4.4)
    axes = figure.add_subplot()
    modelled = [dot for dot in settings if dot.timed is None]
    points = axes.plot([dot.seconds for dot in modelled], [dot.signal for dot in modelled], ".", color=OTHER_COLOUR)
    entries = [(points[0], "modelled")]
    named = [dot for dot in settings if dot.timed is not None]
    for rank, (dot, style) in enumerate(zip(named, line_styles([dot.role for dot in named]), strict=True)):
        timed = dot.timed or 0.0
        axes.plot([dot.seconds, timed], [dot.signal] * 2, color=style["color"], linewidth=1.2)
        entries.append((axes.plot([timed], [dot.signal], "o", color=style["color"], markersize=8)[0], dot.label))
        if rank == 0:
            axes.axline((0, 0), (timed, dot.signal), color=style["color"], linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.05 * max(max(dot.seconds, dot.timed or 0.0) for dot in settings))
    axes.set_ylim(0, 1.1 * max(dot.signal for dot in settings) or 1.0)
    axes.set_xlabel(f"seconds {unit}")
    axes.set_ylabel(f"signal {unit} (modelled)")
    add_legend(figure, entries, WIDE)
    return figure


@styled
def threshold_figure(bars: Sequence[Bar], *, horizon: float, title: str = "", width: float = WIDE) -> Figure:
    """Time to the threshold for each arm; an arm that never reaches it is hatched up to ``horizon`` (seconds)."""
    figure, axes = _bars_figure([bar.label for bar in bars], 0.9, width)
    longest = max([horizon, *(bar.seconds for bar in bars if math.isfinite(bar.seconds))]) or 1.0
    inches = width - 0.4 - 0.1 * min(max((len(bar.label) for bar in bars), default=0), 30 if width == WIDE else 15)
    right = longest / UNITS[unit_for(longest)]
    unit = unit_for(longest)
    for y, (bar, style) in enumerate(zip(bars, line_styles([bar.role for bar in bars]), strict=True)):
        never = not math.isfinite(bar.seconds)
        length = (horizon if never else bar.seconds) / UNITS[unit]
        look = {"facecolor": "none", "hatch": "///"} if never else {"facecolor": style["color"]}
        axes.barh(y, length, height=0.62, edgecolor="#c8ccd0" if never else style["color"], **look)
        offset: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points"}
        text = bar.text if width == WIDE else bar.text.replace("  ", "\n")
        axes.annotate(text, (length, y), va="center", fontsize=9.5, **offset)
        share = 0.08 * max(map(len, text.split("\n"))) / inches  # of the width, for the text
        right = max(right, length / (1 - min(share, 0.75)))
    axes.set_xlim(0, right)
    axes.set_xlabel(f"{title} ({unit})" if title else unit)
    return figure


@styled
def phases_figure(labels: Sequence[str], phases: Sequence[str], seconds: Array, *, width: float = WIDE) -> Figure:
    """Seconds of a step by phase, a stacked bar for each arm; ``seconds`` is ``[arms, phases]``, NaN draws nothing."""
    figure, axes = _bars_figure(labels, 1.3, width)
    left = np.zeros(len(labels))
    total = float(np.nansum(seconds, axis=1).max(initial=0.0))
    entries = []
    for phase, values, colour in zip(phases, np.nan_to_num(seconds).T, PHASE_COLOURS, strict=False):
        bars = axes.barh(range(len(labels)), values, left=left, height=0.62, color=colour)
        texts = [f"{value:.2g}" if value > (0.06 if width == WIDE else 0.12) * total else "" for value in values]
        ink = "#202124" if phase == "other" else "white"
        axes.bar_label(bars, texts, label_type="center", fontsize=9, color=ink)
        entries.append((bars, phase))
        left += values
    axes.set_xlabel("seconds a step")
    add_legend(figure, entries, width)
    return figure


@styled
def steps_figure(series: Sequence[Series], titles: dict[str, str], *, bins: int = 60, width: float = WIDE) -> Figure:
    """Logged metrics over steps, a panel each: the mean over runs, in at most ``bins`` intervals of steps.

    Args:
        series: an entry for each arm.
        titles: metric to panel title, in order; a metric that no arm logged has no panel.
        bins: at most this many points a line.
        width: inches; a narrow figure has one column of panels.
    """
    shown = [metric for metric in titles if any(arm.values.get(metric) for arm in series)]
    columns = 2 if width == WIDE else 1
    rows = max(1, math.ceil(len(shown) / columns))
    figure = new_figure(width, 0.4 + 2.1 * rows)
    styles = line_styles([arm.role for arm in series])
    handles: dict[int, Any] = {}
    for panel, metric in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, panel)
        axes.set_title(titles[metric], fontsize=10.5, loc="left")
        for index, arm in enumerate(series):
            if arm.values.get(metric):
                steps, values = binned(arm.values[metric], bins)
                look = {"linewidth": 1.5, "zorder": 2.6 if arm.role == "reference" else 2.5, **styles[index]}
                (handles[index],) = axes.plot(steps, values, **look)
        axes.set_xlabel("step", fontsize=9.5)
        axes.margins(x=0.01)
    add_legend(figure, [(handle, series[index].label) for index, handle in handles.items()], width)
    return figure


def binned(runs: Sequence[tuple[Array, Array]], bins: int) -> tuple[Array, Array]:
    """Return mean step and mean value of several runs within equal intervals of steps.

    An interval that half of the runs or fewer reach is skipped, since the fastest run alone does not represent the arm.

    >>> steps, values = binned([(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 5.0, 7.0]))], bins=2)
    >>> steps, values
    (array([1.5, 3.5]), array([2., 6.]))
    """
    all_steps = np.concatenate([steps for steps, _ in runs])
    low, high = float(all_steps.min()), float(all_steps.max())
    width = (high - low) / bins or 1.0
    place_R = [np.minimum(((steps - low) / width).astype(int), bins - 1) for steps, _ in runs]
    place, values = np.concatenate(place_R), np.concatenate([values for _, values in runs])
    count = np.bincount(place, minlength=bins)
    reached = sum(np.bincount(np.unique(places), minlength=bins) for places in place_R)
    used = 2 * reached > len(runs)
    mean_step = np.bincount(place, all_steps, minlength=bins)[used] / count[used]
    return mean_step, np.bincount(place, values, minlength=bins)[used] / count[used]
