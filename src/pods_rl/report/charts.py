"""The lines of the page's figures, as plain data for its script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .analysis import Analysis
from .arms import Arm
from .curves import ACCURACIES, LENGTH, Curve, curve_of, finite
from .statistics import Z_95, Array, normal_band
from .text import UNITS, unit_for, words

STEP_METRICS = {
    "reward": "reward, all generated rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward, kept rollouts",
    "pods/zero_variance_share": "share of groups with equal rewards",
    "tools/call_frequency": "tool calls of a rollout",
    "tools/failure_frequency": "share of tool calls that failed",
}

MOST_SEEDS = 120
"""Runs drawn in one figure, evenly chosen from each arm; means are over all."""

MOST_POINTS = 300
"""Points of a line in a figure; a longer curve keeps evenly spread ones."""

CROWD = 6  # with more arms, bands and runs overlap

# Okabe and Ito's palette without its yellow, which is invisible on white; the baseline is grey
_BASELINE = "#5f6368"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 5), (2, 4))
_BINS = 200  # points of a metric over steps

Chart = dict[str, Any]
"""One panel: ``y`` (a name), ``x`` (a list of [key, label]), ``level`` ([value, label] or None), ``note``, ``crowded``
(whether runs and bands are hidden at first), and ``arms``, each with ``label``, ``colour``, ``dash``, ``crossing``
(time and score of the checkpoint at which its mean reaches the level, or None) and, by key of x, ``lines``."""


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


def charts(analysis: Analysis) -> dict[str, list[Chart]]:
    """Return the panels of the page's figures: ``scores`` of evaluations, the compared one first, and ``steps``."""
    names = [analysis.metric, *(name for name in (*ACCURACIES, LENGTH) if name != analysis.metric)]
    scores = [chart_of(analysis, name) for name in names]
    steps = [_steps_chart(analysis, metric) for metric in STEP_METRICS]
    found = {"scores": [one for one in scores if one["arms"]], "steps": [one for one in steps if one["arms"]]}
    return {name: panels for name, panels in found.items() if panels}


def chart_of(analysis: Analysis, metric: str) -> Chart:
    """Return a metric of evaluations over training time, steps, and tokens, as far as the runs logged them."""
    own = {arm.name: curve for arm in analysis.arms if (curve := arm.curves(analysis.metric).get(metric))}
    arms = [arm for arm in analysis.arms if arm.name in own]
    unit = unit_for(max((float(np.nanmax(curve.seconds)) for curve in own.values()), default=1.0))
    scales = {"time": 1 / UNITS[unit], "step": 1.0}
    of_cpu = " of processor time" if any(arm.config.get("clock") == "cpu" for arm in arms) else ""
    labels = {"time": f"training time ({unit}{of_cpu})", "step": "step"}
    over_steps = [curve for arm in arms if (curve := _curve_over_steps(arm, metric))]
    curves = {"time": [*own.values()]} | ({"step": over_steps} if len(over_steps) == len(arms) else {})
    seeds = max(1, MOST_SEEDS // max(1, len(arms)))
    cut = sum(arm.run_count > seeds for arm in arms)
    drawn: list[Chart] = []
    styles = styles_of(analysis)
    for rank, arm in enumerate(arms):
        lines = {key: _lines(given[rank], scales[key], seeds) for key, given in curves.items()}
        crossing = _crossing(analysis, metric, arm, UNITS[unit])
        drawn.append({"label": arm.label, **styles[arm.name]._asdict(), "crossing": crossing, "lines": lines})
    return {
        "y": words(metric),
        "x": [[key, labels[key]] for key in curves],
        "level": _level(analysis, metric),
        "crowded": len(arms) > CROWD,
        "note": f"Of {cut} arms, {seeds} runs each are drawn, evenly chosen; means are over all." if cut else "",
        "arms": drawn,
    }


def _level(analysis: Analysis, metric: str) -> list[Any] | None:
    base = analysis.baseline if metric == analysis.metric else None
    result = analysis.speedup_of(base.name) if base else None
    if base is None or result is None or not math.isfinite(result.threshold):
        return None
    return [_short(result.threshold), f"99 % of {base.label}’s peak"]


def _crossing(analysis: Analysis, metric: str, arm: Arm, unit: float) -> list[float | None] | None:
    """Return time and mean score of the checkpoint at which an arm reaches the level; None if it never does."""
    result = analysis.speedup_of(arm.name) if metric == analysis.metric else None
    if result is None or arm.curve is None or not math.isfinite(result.arm_time):
        return None
    at = int(np.nanargmin(np.abs(arm.curve.times - result.arm_time)))
    return [_short(result.arm_time / unit), _short(arm.curve.mean[at])]


def _band(curve: Curve) -> tuple[Array, Array] | None:
    """Return 1.96 standard errors about the mean: over runs, or of the evaluation if there is one run; else None."""
    if not curve.is_single:
        return normal_band(curve.scores)
    if not curve.has_errors:
        return None
    return curve.scores[0] - Z_95 * curve.errors[0], curve.scores[0] + Z_95 * curve.errors[0]


def _curve_over_steps(arm: Arm, metric: str) -> Curve | None:
    """Return the arm's curve over steps instead of seconds; None if a run has not logged them."""
    evals: dict[str, list[Mapping[str, Any]]] = {}
    for run in arm.runs:
        steps = [finite(row.get("step")) for row in run.evals]
        if not steps or None in steps:
            return None
        pairs = zip(run.evals, steps, strict=True)
        evals[str(run.path)] = [{**row, "due": row.get("due", row.get("seconds")), "seconds": at} for row, at in pairs]
    return curve_of(evals, metric)


def _lines(curve: Curve, scale: float, seeds: int) -> dict[str, Any]:
    """Return one arm over one axis: the mean with its band, and runs, thinned."""
    count = curve.scores.shape[1]
    kept = np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int)
    runs = np.linspace(0, len(curve.runs) - 1, min(len(curve.runs), seeds)).round().astype(int)
    low, high = _band(curve) or (None, None)
    return {
        "x": _numbers(curve.times[kept] * scale),
        "mean": _numbers(curve.mean[kept]),
        "low": [] if low is None else _numbers(low[kept]),
        "high": [] if high is None else _numbers(high[kept]),
        "seeds": [
            [_seed_name(curve.runs[run]), _numbers(curve.seconds[run][kept] * scale), _numbers(curve.scores[run][kept])]
            for run in (runs.tolist() if len(curve.runs) > 1 else [])
        ],
    }


def _seed_name(run: str) -> str:
    """Return the last part of a run's path, without the word that all have: ``1`` of ``runs/pods/seed-1``."""
    return run.replace("\\", "/").rstrip("/").rpartition("/")[2].removeprefix("seed-")


def _steps_chart(analysis: Analysis, metric: str) -> Chart:
    """Return a logged metric over steps: means over runs within equal intervals of steps."""
    drawn: list[Chart] = []
    styles = styles_of(analysis)
    for arm in analysis.arms:
        if runs := step_values(arm, metric):
            steps, values = binned(runs, _BINS)
            lines = {"x": _numbers(steps), "mean": _numbers(values), "low": [], "high": [], "seeds": []}
            drawn.append({"label": arm.label, **styles[arm.name]._asdict(), "lines": {"step": lines}})
    panel: Chart = {"y": STEP_METRICS[metric], "x": [["step", "step"]], "level": None, "crowded": False, "note": ""}
    return panel | {"arms": drawn}


def step_values(arm: Arm, metric: str) -> list[tuple[Array, Array]]:
    """Return the steps and the values of a logged metric, for each run that has it."""
    found = []
    for run in arm.runs:
        points = [(finite(row.get("step")), finite(row.get(metric))) for row in run.metrics]
        known = np.array([point for point in points if None not in point], dtype=np.float64)
        if len(known):
            found.append((known[:, 0], known[:, 1]))
    return found


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


def _numbers(values: Array) -> list[float | None]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    """Return five digits, more than a screen shows; NaN becomes null."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
