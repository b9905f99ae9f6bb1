"""The sentences of a report: headlines, what limits the numbers, and how they were computed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from .analysis import Analysis, Pair
from .arms import Arm, damaged_files
from .statistics import FEW, Z_95
from .text import duration, interval, number, plain, plural, words

_NAMED = 4  # pairs or arms that get a sentence of their own


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Return the final scores of the pair that the experiment is about, its speedup, then the other pairs.

    Without a pair: the first and last score of each arm.
    """
    pairs = [pair for pair in analysis.pairs if _trained(pair.arm) and _trained(pair.other)]
    scored = [arm for arm in analysis.arms if arm.name in analysis.finals]
    scored.sort(key=lambda arm: -analysis.finals[arm.name].final)
    if not pairs:
        found = tuple(_progress(analysis, arm) for arm in scored[:_NAMED])
        return found or (f"No evaluation of {plain(analysis.metric)} yet.",)
    lines = [_scores(analysis, pairs[0]), _speedup(pairs[0])]
    if len(pairs) < _NAMED:
        return (*lines, *(_scores(analysis, pair) for pair in pairs[1:]))
    best = number(analysis.finals[scored[0].name].final)
    return (*lines, f"{scored[0].label} scores highest of {len(scored)} arms: {best}. The table has all pairs.")


def _trained(arm: Arm) -> bool:
    """Whether an arm was evaluated after its start."""
    return arm.curve is not None and arm.curve.due[arm.curve.last()] > 0


def _progress(analysis: Analysis, arm: Arm) -> str:
    end, what, runs = analysis.finals[arm.name], words(analysis.metric), plural(arm.run_count, "run")
    if not _trained(arm):
        return f"{arm.label} starts at {number(end.start)} {what}, {runs}."
    spread = interval(end.low, end.high, 3)
    if arm.is_single and not math.isnan(end.error):
        spread = f"± {number(Z_95 * end.error)}"
    score = number(end.final) if spread == "–" else f"{number(end.final)} {spread}"
    return f"{arm.label} went from {number(end.start)} to {score} {what} in {duration(end.final_seconds)}, {runs}."


def _scores(analysis: Analysis, pair: Pair) -> str:
    """Return the final scores of two arms, their difference, and whether it is settled."""
    ours, theirs = (number(analysis.finals[arm.name].final) for arm in (pair.arm, pair.other))
    gap, counts = pair.difference, sorted({arm.run_count for arm in (pair.arm, pair.other)})
    runs = f"{plural(counts[0], 'run')} each" if len(counts) == 1 else f"{counts[0]} and {counts[1]} runs"
    spread = interval(gap.low, gap.high, 3)
    change = f"{gap.mean:+.3f}" if spread == "–" else f"{gap.mean:+.3f} {spread}"
    line = f"{pair.arm.label} ends at {ours} {words(analysis.metric)}, {pair.other.label} at {theirs}: {change}"
    if gap.settled:
        return f"{line}, {runs}."
    if not gap.side:
        return f"{line}. Not settled with {runs}."
    side = "above" if gap.side > 0 else "below"
    return (
        f"{line}. Not settled with {runs}, but every run of {pair.arm.label} is {side} every run of {pair.other.label}."
    )


def _speedup(pair: Pair) -> str:
    """Return how much sooner an arm reached the other's level."""
    result, arm = pair.speedup, pair.arm.label
    goal = f"99 % of {pair.other.label}’s peak ({number(result.threshold)})"
    spread = f" {interval(result.ci_low, result.ci_high)}" if result.has_interval else ""
    if math.isinf(result.arm_time):
        return f"{arm} never reached {goal}."
    if result.speedup == 0:
        return f"{arm} reached {goal} after {duration(result.arm_time)}, {pair.other.label} at its first evaluation."
    if math.isinf(result.speedup):
        return f"{arm} reached {goal} at its first evaluation."
    line = f"{arm} reached {goal} with a speedup of {result.speedup:.2f}x{spread}."
    if result.settled:
        return line
    return f"{line} Not settled{f' with fewer than {FEW} runs each' if result.runs < FEW else ''}."


def notes(analysis: Analysis) -> tuple[str, ...]:
    """Return the limitations of the numbers, each a sentence or two; empty if there are none."""
    found = [*_run_notes(analysis), *_baseline_notes(analysis)]
    for arm in analysis.arms:
        found += [f"{arm.label}: {line}" for line in _curve_notes(analysis, arm)]
    if damage := damaged_files(analysis.arms, (analysis.metric, f"{analysis.metric}_se", "prompts")):
        found.append(f"Skipped unreadable data: {damage}.")
    devices = Counter(plain(run.environment["device"]) for run in analysis.runs if run.environment.get("device"))
    if len(devices) > 1:
        parts = ", ".join(f"{count} on {device}" for device, count in devices.items())
        found.append(f"Runs used different devices ({parts}). Their times cannot be compared.")
    return tuple(found)


def _run_notes(analysis: Analysis) -> list[str]:
    """Return notes on runs that are missing, that did not finish, or that are too few."""
    found = []
    absent = {arm.label: arm.missing for arm in analysis.arms if arm.missing}
    if absent:
        planned = sum(absent.values()) + sum(arm.run_count for arm in analysis.arms)
        parts = ", ".join(f"{count} of {label}" for label, count in absent.items())
        found.append(f"{sum(absent.values())} of {planned} planned runs are missing: {parts}.")
    states = Counter(run.state for run in analysis.runs if run.state != "finished")
    if states:
        parts = ", ".join(f"{count} {plain(state)}" for state, count in sorted(states.items()))
        unfinished = f"{states.total()} of {len(analysis.runs)} runs did not finish ({parts})."
        found.append(f"{unfinished} Each counts up to its last evaluation.")
    lone = [arm.label for arm in analysis.arms if arm.is_single]
    few = [arm.label for arm in analysis.arms if arm.curve and 1 < len(arm.curve.runs) < FEW]
    if lone:
        found.append(f"One run does not show how seeds differ. Its ± and band are over prompts: {', '.join(lone)}.")
    if few:
        found.append(f"With fewer than {FEW} runs, bands and speedup intervals are too narrow: {', '.join(few)}.")
    return found


def _curve_notes(analysis: Analysis, arm: Arm) -> list[str]:
    """Return what is missing from an arm's curve."""
    found = []
    curve, end = arm.curve, analysis.finals.get(arm.name)
    if silent := arm.run_count - (len(curve.runs) if curve else 0):
        found.append(f"{silent} of {arm.run_count} runs have no evaluation of {plain(analysis.metric)}.")
    if curve is None:
        return found
    if not _trained(arm):
        found.append("no evaluation after its start.")
    if curve.interpolated:
        found.append("its runs were evaluated at different times. Scores are interpolated linearly to common times.")
    if thin := int(np.isnan(curve.mean).sum()):
        found.append(f"{thin} of its {len(curve.due)} checkpoints are in no mean: half of its runs or fewer have them.")
    if end and end.final_runs < len(curve.runs):
        found.append(f"its final score is the mean of {end.final_runs} of {len(curve.runs)} runs; the others ended.")
    if end and curve.due[curve.last()] < analysis.horizon * (1 - 1e-9):
        ends, horizon = duration(end.final_seconds), duration(analysis.horizon)
        found.append(f"it ends at {ends}. Scores are compared at {horizon}.")
    return found


def _baseline_notes(analysis: Analysis) -> list[str]:
    base = analysis.baseline
    if len(analysis.arms) < 2:
        return []
    if base is None:
        return ["No baseline is set, so nothing is compared."]
    result = analysis.speedup_of(base.name, "peak")
    if result is None or base.curve is None:
        what = "no checkpoint that most of its runs share" if base.curve else "no evaluation"
        return [f"{base.label}, the baseline, has {what}, so nothing is compared."]
    found = []
    if result.arm_time <= float(np.nanmin(base.curve.times)):
        found.append(f"{base.label} peaks at its first evaluation: its level does not show what training gains.")
    zero = [pair for pair in analysis.pairs if pair.other is base and pair.speedup.never_reached > 0]
    if zero:
        shares = (f"{pair.arm.label} {100 * pair.speedup.never_reached:.1f} %" for pair in zero)
        found.append(f"Resamples that never reach the level count as a speedup of 0: {', '.join(shares)}.")
    return found


def method(analysis: Analysis) -> tuple[str, ...]:
    """Return how the numbers were computed, in sentences."""
    lines = [
        "Time is the training clock, without evaluation. Checkpoints of different runs are matched by their nominal "
        "second. A mean needs more than half of an arm’s runs. A run that failed counts up to its last evaluation. "
        "Intervals of scores are 1.96 standard errors over runs, as in the paper.",
    ]
    if any(arm.config.get("clock") == "cpu" for arm in analysis.arms):
        lines.append("Time is processor time of the training process, without that of its reward processes.")
    if analysis.pairs:
        lines += [
            "A difference of scores has Welch’s 95 % interval over runs, which also allows for the standard error of "
            "the evaluations. It is settled if the interval excludes 0.",
            "A speedup follows the authors’ rule: the time at which the other arm’s mean curve first reaches 99 % of "
            "its maximum, over the time at which this arm’s does. Its interval is a bootstrap of "
            f"{analysis.resamples} resamples of the runs (seed {analysis.seed}). It is settled if the interval "
            f"excludes 1 and both arms have at least {FEW} runs.",
        ]
    return tuple(lines)
