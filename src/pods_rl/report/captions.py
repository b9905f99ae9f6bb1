"""What is said under each figure: no more than what is drawn in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from .ablations import Ablation
from .analysis import Analysis
from .figures import CROWD, MOST_RUNS, Line, band_of, drawn_runs, limits
from .roles import bars_of, lines_of, roles_of
from .statistics import mean_curve
from .text import duration

_MOST_NAMES = 20


def curves_note(analysis: Analysis, metric: str) -> str:
    """Of a figure over training time."""
    lines = lines_of(analysis, metric)
    named = [line for line in lines if line.role != "other"]
    level = metric == analysis.metric and bool(analysis.speedups)
    dots = ""
    if level and any(math.isfinite(line.crossing) for line in named):
        what = "a line" if all(len(line.scores) == 1 for line in named) else "a mean"
        dots = f" Dots: where {what} first reaches the dashed level."
    return f"{_lines_note(analysis, named)}{dots}{_others_note(lines)}"


def _lines_note(analysis: Analysis, named: Sequence[Line]) -> str:
    """The lines and bands of the arms that have colours."""
    several, single = (
        [line for line in named if len(line.scores) > 1],
        [line for line in named if len(line.scores) == 1],
    )
    parts = []
    if several:
        some = any(len(drawn_runs(line)) < len(line.scores) for line in several)
        runs = f"Thin lines are runs, at most {MOST_RUNS} of an arm" if some else "Thin lines are runs"
        parts.append(f"{runs}, thick ones their mean")
    if single:
        parts.append("an arm of one run is its line" if several else "Each line is one run")
    if len(named) <= CROWD:
        if any(band_of(line) for line in several):
            parts.append("bands 1.96 standard errors over runs")
        if any(band_of(line) for line in single):
            bands = "its band" if several else "bands"
            parts.append(f"{bands} 1.96 standard errors of the evaluation over its prompts, not over runs")
    text = ", ".join(parts)
    if several:
        text += "; a checkpoint’s time is the mean of its real seconds"
    mixed = [arm.label for arm in analysis.arms if arm.curve and arm.curve.interpolated]
    return (f"{text}." if text else "") + (f" Interpolated to common times: {names(mixed)}." if mixed else "")


def _others_note(lines: Sequence[Line]) -> str:
    """The grey lines of a figure by name, and those that its axis does not hold."""
    others = [line for line in lines if line.role == "other"]
    if not others:
        return ""
    low, high = limits(lines)
    means = {line.label: mean_curve(line.scores) for line in others}
    outside = [label for label, mean in means.items() if ((mean < low) | (mean > high)).any()]
    note = f" Grey, means only: {names([*means])}."
    return note + (f" Partly or wholly outside the axis: {names(outside)}." if outside else "")


def threshold_note(analysis: Analysis) -> str:
    """Of the figure of times to the baseline's level."""
    results = [result for arm in bars_of(analysis) if (result := analysis.speedup_of(arm.name))]
    single = all(not arm.curve or len(arm.curve.runs) == 1 for arm in analysis.arms)
    note = f"The first checkpoint at which {'an arm' if single else 'an arm’s mean'} reaches the level, and the speedup"
    note += " with its 95 % interval." if any(not math.isnan(result.ci_low) for result in results) else "."
    if any(result.never_reached > 0 for result in results):
        note += " In an interval, a resample that never reaches the level counts as 0."
    if any(math.isinf(result.arm_time) for result in results):
        note += " Hatched: never reached."
    return note + _bars_note(analysis)


def phases_note(analysis: Analysis) -> str:
    """Of the figure of seconds by phase."""
    runs = ", then over runs" if any(arm.run_count > 1 for arm in analysis.arms) else ""
    note = f"The mean over the steps of a run{runs}. Evaluation is not in the training clock."
    return note + _bars_note(analysis)


def steps_note(analysis: Analysis, logged: Collection[str]) -> str:
    """Of the figure over steps; ``logged`` are the metrics that have a panel."""
    several = any(arm.run_count > 1 for arm in analysis.arms)
    means = "Means over the runs of an arm" if several else "Means"
    note = f"{means} within equal stretches of steps{', as far as most of its runs got' if several else ''}."
    if "reward" in logged:
        note += " Reward is over all n rollouts of a prompt."
    if any(name.startswith("pods/selected/") for name in logged):
        note += " Kept rollouts are the m that were trained on."
    roles = roles_of(analysis)
    undrawn = [arm.label for arm in analysis.arms if roles[arm.name] == "other" and arm.runs]
    return note + (f" Not drawn: {names(undrawn)}." if undrawn else "")


def ablation_note(analysis: Analysis, ablation: Ablation) -> str:
    """Of the figure of an ablation."""
    lines = [Line(arm.label, arm.curve.seconds, arm.curve.scores) for arm in ablation.arms if arm.curve]
    finals = [analysis.finals[arm.name] for arm in ablation.arms if arm.name in analysis.finals]
    spread = " with the same interval" if any(not np.isnan(final.low) for final in finals) else ""
    return (
        f"All with {ablation.held}. {_lines_note(analysis, lines)} In the second panel the score at "
        f"{duration(analysis.horizon)} of training{spread}; faint dots are runs."
    )


def _bars_note(analysis: Analysis) -> str:
    drawn = len(bars_of(analysis))
    return f" {drawn} of {len(analysis.arms)} arms are drawn." if drawn < len(analysis.arms) else ""


def names(labels: Sequence[str]) -> str:
    """Labels in a row, of very many the first ones.

    >>> names(["a", "b"])
    'a, b'
    """
    more = f" and {len(labels) - _MOST_NAMES} more" if len(labels) > _MOST_NAMES else ""
    return ", ".join(labels[:_MOST_NAMES]) + more
