"""The look that every figure shares: palette, sizes, legend, and a figure as bytes. No global state is touched."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .text import plain

Role = Literal["baseline", "reference", "arm", "other"]
"""What an arm is in a figure: the baseline, the arm that ablations vary, one of the rest, or one drawn faintly."""

# Okabe and Ito's palette without its yellow, which is lost on white; the baseline is grey
BASELINE_COLOUR, REFERENCE_COLOUR, OTHER_COLOUR = "#5f6368", "#D55E00", "#bcc2c9"
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":")
WIDE, NARROW = 8.4, 4.4  # inches: a desktop page or a README, and a phone
TEXT = "#3c4043"

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


def styled(make: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw within our settings of matplotlib, and leave those of the caller alone."""

    @wraps(make)
    def draw(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context(_STYLE):
            return make(*args, **kwargs)

    return draw


def line_styles(roles: Sequence[Role]) -> list[dict[str, Any]]:
    """Colour and dash for each arm: the palette in order, but for those whose role has a colour of its own.

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


def add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], width: float) -> None:
    """Above the axes, in as many columns as there is room for; the figure grows with its rows."""
    if not handles:
        return
    labels = [short(label, width, 40) for label in labels]
    columns = next(count for count in range(len(labels), 0, -1) if count == 1 or _letters(labels, count) <= width * 12)
    figure.set_figheight(figure.get_figheight() + 0.2 * (math.ceil(len(labels) / columns) - 1))
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns, "fontsize": 9.5}
    legend = figure.legend(handles, ["x"] * len(handles), **place)
    for entry, label in zip(legend.get_texts(), labels, strict=True):
        entry.set_text(label)  # set afterwards: a label that starts with "_" would be left out


def _letters(labels: Sequence[str], columns: int) -> int:
    """Width of a legend in letters: its columns are filled one after the other, each as wide as its longest label."""
    rows, longer = divmod(len(labels), columns)
    ends = [rows * (column + 1) + min(column + 1, longer) for column in range(columns)]
    return sum(6 + max(map(len, labels[start:end])) for start, end in zip([0, *ends], ends, strict=False))


def short(label: str, width: float, limit: int) -> str:
    return plain(label, limit if width == WIDE else limit // 2)


def name_rows(axes: Axes, labels: Sequence[str], width: float) -> None:
    """Name horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), [short(label, width, 30) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def to_bytes(figure: Figure, kind: Literal["svg", "png"], dpi: int = 180) -> bytes:
    """The figure as ``svg`` or ``png``, the same bytes each time; ``dpi`` is also that of images within an SVG."""
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        if engine := figure.get_layout_engine():  # laid out once: savefig would do it anew for each file
            engine.execute(figure)
            figure.set_layout_engine("none")
        figure.set_dpi(dpi)
        if kind == "svg":
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
        else:
            FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
