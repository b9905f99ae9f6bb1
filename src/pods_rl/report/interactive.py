"""What the page's script draws again so that a reader can look closer: the lines of the figures, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .analysis import Analysis
from .arms import Arm
from .curves import ACCURACIES, LENGTH, Curve, curve_of, finite
from .figures import STEP_METRICS, roles_of, step_values
from .line_plots import Line
from .plots import binned, line_styles
from .statistics import Array
from .text import UNITS, unit_for, words

MOST_SEEDS = 120
"""Runs drawn in one figure, evenly chosen of each arm; means are over all."""

MOST_CELLS = 1_000_000
"""Lines times points of a figure that a browser redraws without a pause; a longer curve keeps evenly spread points."""

_DASHES: dict[str, list[int]] = {"-": [], "--": [8, 5], ":": [2, 4]}
_BINS = 200  # points of a metric over steps
_TOKENS = {"generated": "pods/tokens/generated", "trained": "pods/tokens/trained"}

Chart = dict[str, Any]
"""One figure: ``y`` (a name), ``x`` (a list of [key, label]), ``level`` ([value, label] or None), ``note``, and
``arms``, each with ``label``, ``colour``, ``dash``, ``crossing`` (the time at which it reaches the level, or None) and,
by key of x, ``lines``: x, mean, low, high and seeds."""


def charts(analysis: Analysis) -> dict[str, list[Chart]]:
    """Return the figures that the page redraws, by the name of their picture; one of several panels has several."""
    found = {"curves": [chart_of(analysis, analysis.metric)]}
    found |= {name: [chart_of(analysis, name)] for name in (*ACCURACIES, LENGTH) if name != analysis.metric}
    found["steps"] = [chart for metric in STEP_METRICS if (chart := _steps_chart(analysis, metric))]
    return {name: kept for name, given in found.items() if (kept := [chart for chart in given if chart["arms"]])}


def chart_of(analysis: Analysis, metric: str) -> Chart:
    """Return a metric of evaluations over training time, steps, and tokens, as far as the runs logged them."""
    arms = [arm for arm in analysis.arms if arm.curves(analysis.metric).get(metric)]
    styles = line_styles([roles_of(analysis)[arm.name] for arm in arms])
    unit = unit_for(max((float(np.nanmax(arm.curves(analysis.metric)[metric].seconds)) for arm in arms), default=1.0))
    of_cpu = " of processor time" if any(arm.config.get("clock") == "cpu" for arm in arms) else ""
    labels = {
        "time": f"training time ({unit}{of_cpu})",
        "step": "step",
        "generated": "completion tokens generated",
        "trained": "completion tokens trained",
    }
    curves: dict[str, list[Curve | None]] = {
        "time": [arm.curves(analysis.metric)[metric] for arm in arms],
        **{key: [_curve_over(arm, metric, key) for arm in arms] for key in ("step", "generated", "trained")},
    }
    usable = {key: [curve for curve in found if curve] for key, found in curves.items()}
    shown = [key for key, found in usable.items() if len(found) == len(arms) and arms]
    seeds = max(1, MOST_SEEDS // max(1, len(arms)))
    series = len(arms) * 4 + sum(min(seeds, arm.run_count) for arm in arms)
    points = max(20, MOST_CELLS // (series * series or 1))
    return {
        "y": words(metric),
        "x": [[key, labels[key]] for key in shown],
        "level": _level(analysis, metric),
        "note": _note(arms, seeds),
        "arms": [
            {
                "label": arm.label,
                "colour": style["color"],
                "dash": _DASHES[style["linestyle"]],
                "crossing": _crossing(analysis, metric, arm, UNITS[unit]),
                "lines": {
                    key: _lines(usable[key][rank], 1 / UNITS[unit] if key == "time" else 1.0, seeds, points)
                    for key in shown
                },
            }
            for rank, (arm, style) in enumerate(zip(arms, styles, strict=True))
        ],
    }


def _level(analysis: Analysis, metric: str) -> list[Any] | None:
    base = analysis.baseline if metric == analysis.metric else None
    result = analysis.speedup_of(base.name) if base else None
    if base is None or result is None or not math.isfinite(result.threshold):
        return None
    return [_short(result.threshold), f"99 % of {base.label}’s peak"]


def _crossing(analysis: Analysis, metric: str, arm: Arm, unit: float) -> float | None:
    result = analysis.speedup_of(arm.name) if metric == analysis.metric else None
    return _short(result.arm_time / unit) if result else None


def _note(arms: Sequence[Arm], seeds: int) -> str:
    cut = [arm.label for arm in arms if arm.run_count > seeds]
    return f"Of {len(cut)} arms, {seeds} runs each are drawn, evenly chosen; means are over all." if cut else ""


def _curve_over(arm: Arm, metric: str, key: str) -> Curve | None:
    """The arm's curve over steps or tokens in place of seconds; None if a run has not logged them."""
    evals: dict[str, list[Mapping[str, Any]]] = {}
    for run in arm.runs:
        rows = [(row, finite(row.get("step"))) for row in run.evals]
        steps = np.array([math.nan if step is None else step for _, step in rows])
        places = steps if key == "step" else _tokens_at(run.metrics, _TOKENS[key], steps)
        if not len(rows) or np.isnan(places).any():
            return None
        evals[str(run.path)] = [
            {**row, "due": row.get("due", row.get("seconds")), "seconds": place}
            for (row, _), place in zip(rows, places.tolist(), strict=True)
        ]
    return curve_of(evals, metric)


def _tokens_at(metrics: Sequence[Mapping[str, Any]], key: str, steps: Array) -> Array:
    """Tokens of all steps up to each of these; NaN if a line lacks them. A line counts for the steps before it."""
    logged = [(finite(row.get("step")), finite(row.get(key))) for row in metrics]
    points = np.array([(step, value) for step, value in logged if step is not None and value is not None])
    if len(points) < len(logged) or not len(points):
        return np.full(len(steps), math.nan)
    logged_at = np.r_[0.0, points[:, 0]]
    return np.interp(steps, logged_at, np.r_[0.0, (points[:, 1] * np.diff(logged_at)).cumsum()])


def _lines(curve: Curve, scale: float, seeds: int, points: int) -> dict[str, Any]:
    """One arm over one axis: the mean with its band, and runs, thinned."""
    count = curve.scores.shape[1]
    kept = np.linspace(0, count - 1, min(count, points)).round().astype(int)
    runs = np.linspace(0, len(curve.runs) - 1, min(len(curve.runs), seeds)).round().astype(int)
    band = Line("", curve.seconds, curve.scores, errors=curve.errors).band
    low, high = band if band else (None, None)
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
    """The last part of a run's path, without the word that all have: ``1`` of ``runs/pods/seed-1``."""
    return run.replace("\\", "/").rstrip("/").rpartition("/")[2].removeprefix("seed-")


def _steps_chart(analysis: Analysis, metric: str) -> Chart | None:
    """A logged metric over steps: means within equal intervals of steps, as in the picture but finer."""
    roles = roles_of(analysis)
    arms = [arm for arm in analysis.arms if roles[arm.name] != "other"]
    styles = line_styles([roles[arm.name] for arm in arms])
    drawn = []
    for arm, style in zip(arms, styles, strict=True):
        runs = step_values(arm, metric)
        if runs:
            steps, values = binned(runs, _BINS)
            lines = {"x": _numbers(steps), "mean": _numbers(values), "low": [], "high": [], "seeds": []}
            drawn.append(
                {
                    "label": arm.label,
                    "colour": style["color"],
                    "dash": _DASHES[style["linestyle"]],
                    "lines": {"step": lines},
                }
            )
    if not drawn:
        return None
    return {"y": STEP_METRICS[metric], "x": [["step", "step"]], "level": None, "note": "", "arms": drawn}


def _numbers(values: Array) -> list[float | None]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    """Five digits are more than a screen shows; NaN is null."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
