"""The colour and dash of each arm in a figure."""

from __future__ import annotations

from typing import NamedTuple

from .analysis import Analysis

CROWD = 6  # with more arms, bands and runs overlap

# Okabe and Ito's palette without its yellow, which is invisible on white; the baseline is grey
_BASELINE = "#5f6368"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 5), (2, 4))


class Style(NamedTuple):
    """A colour, and the lengths of dashes and gaps in points; none for a solid line."""

    colour: str
    dash: tuple[int, ...] = ()


def line_styles(count: int) -> list[Style]:
    """Return distinct styles for up to 21 arms.

    >>> [style.colour for style in line_styles(2)]
    ['#D55E00', '#0072B2']
    """
    colours = len(_COLOURS)
    return [Style(_COLOURS[at % colours], _DASHES[at // colours % len(_DASHES)]) for at in range(count)]


def styles_of(analysis: Analysis) -> dict[str, Style]:
    """Return the style of each arm by name, the same in every figure; the arm that the report is about comes first."""
    subject = analysis.pairs[0].arm if analysis.pairs else None
    others = [arm for arm in analysis.arms if arm is not analysis.baseline and arm is not subject]
    ordered = [*([subject] if subject else []), *others]
    styles = {arm.name: style for arm, style in zip(ordered, line_styles(len(ordered)), strict=True)}
    return styles | ({analysis.baseline.name: Style(_BASELINE)} if analysis.baseline else {})
