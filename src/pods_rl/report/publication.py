"""The figures of a report for a paper: one column wide, fonts embedded, readable in grey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from .analysis import Analysis
from .figures import sketches
from .plots import NARROW, STYLE, letters, place_legend, to_bytes

COLUMN = 3.25  # inches: a column of a paper with two
_DPI = 600
_DASHES = ("-", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))


def printed(analysis: Analysis, kinds: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield a file name and its content for each figure in each format."""
    for name, sketch in sketches(analysis).items():
        for kind in kinds:
            yield f"{name}.{kind}", to_bytes(_for_print(sketch.draw(NARROW)), kind, dpi=_DPI)


def _for_print(figure: Figure) -> Figure:
    """Shrink a narrow figure to a column with all that is on it, and give each colour of a mean its own dash."""
    scale = COLUMN / figure.get_figwidth()
    dashes: dict[Any, Any] = {}
    for line in figure.findobj(Line2D):
        assert isinstance(line, Line2D)
        if line.get_linewidth() >= 1.5 and line.get_linestyle() == "-":
            line.set_linestyle(dashes.setdefault(line.get_color(), _DASHES[len(dashes) % len(_DASHES)]))
        line.set_linewidth(line.get_linewidth() * scale)
        line.set_markersize(line.get_markersize() * scale)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_fontsize(float(text.get_fontsize()) * scale)
    for legend in [*figure.legends]:  # its spaces were fixed when it was made
        labels, handles = [text.get_text() for text in legend.get_texts()], legend.legend_handles
        legend.remove()
        fitting = (count for count in range(len(labels), 1, -1) if letters(labels, count) <= NARROW * 12)
        with mpl.rc_context(STYLE):
            place_legend(figure, handles, labels, next(fitting, 1), 9.5 * scale)
    figure.set_size_inches(COLUMN, figure.get_figheight() * scale)
    return figure
