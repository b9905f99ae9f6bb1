"""The figure of what was logged over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .statistics import Array
from .style import WIDE, Role, add_legend, line_styles, new_figure, styled


@dataclass(frozen=True)
class Series:
    """One arm's logged metrics over steps: for each metric, one (steps, values) pair a run."""

    label: str
    values: dict[str, list[tuple[Array, Array]]] = field(default_factory=dict)
    role: Role = "arm"


@styled
def steps_figure(series: Sequence[Series], titles: dict[str, str], *, bins: int = 60, width: float = WIDE) -> Figure:
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
    add_legend(figure, list(handles.values()), [series[index].label for index in handles], width)
    return figure


def binned(runs: Sequence[tuple[Array, Array]], bins: int) -> tuple[Array, Array]:
    """Mean of several runs' values within equal stretches of steps.

    A stretch that half of the runs or fewer reach is left out: a mean over the fastest run says nothing of the arm.

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
