"""The sentences of a report: headlines, what limits the numbers, and how they were computed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from ..text import counted
from .analysis import Analysis, Pair
from .arms import Arm, damaged_files
from .statistics import FEW, Z_95
from .text import duration, interval, number, plain, unit_for, words

_NAMED = 6  # pairs or arms that get a line of their own


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Return a line for each of the first pairs of arms, then the speedup of the one that the experiment is about.

    Without a pair: the first and last score of each arm.
    """
    pairs = [pair for pair in analysis.pairs if _trained(pair.arm) and _trained(pair.other)]
    if not pairs:
        scored = [arm for arm in analysis.arms if arm.name in analysis.finals]
        scored.sort(key=lambda arm: -analysis.finals[arm.name].final)
        found = tuple(_progress(analysis, arm) for arm in scored[:_NAMED])
        return found or (f"No evaluation of {plain(analysis.metric)} yet.",)
    return (*(_scores(analysis, pair) for pair in pairs[:_NAMED]), _speedup(pairs[0]))


def _trained(arm: Arm) -> bool:
    """Whether an arm was evaluated after its start."""
    return arm.curve is not None and arm.curve.due[arm.curve.last()] > 0


def _progress(analysis: Analysis, arm: Arm) -> str:
    """Return the first and last score of an arm."""
    end, what, runs = analysis.finals[arm.name], words(analysis.metric), counted(arm.run_count, "run")
    if not _trained(arm):
        return f"{arm.label} starts at {number(end.start)} {what}, {runs}."
    spread = f" {interval(end.low, end.high, 3)}".removesuffix(" –")
    if arm.is_single and not math.isnan(end.error):
        spread = f" ± {number(Z_95 * end.error)}"
    times = f"in {duration(end.final_seconds)}, {runs}"
    return f"{arm.label} went from {number(end.start)} to {number(end.final)}{spread} {what} {times}."


def _scores(analysis: Analysis, pair: Pair) -> str:
    """Return who ends higher and by how much, and in a second sentence whether to believe it."""
    arm, other, gap = pair.arm.label, pair.other.label, pair.difference
    ours, theirs = (number(analysis.finals[one.name].final) for one in (pair.arm, pair.other))
    counts = sorted({one.run_count for one in (pair.arm, pair.other)})
    runs = f"{counted(counts[0], 'run')} each" if len(counts) == 1 else f"{counts[0]} and {counts[1]} runs"
    side = "above" if gap.mean >= 0 else "below"
    place = f"{abs(gap.mean):.3f} {side}" if round(gap.mean, 3) else "level with"
    line = f"{arm} ends {place} {other}: {words(analysis.metric)} {ours} against {theirs}."
    if math.isnan(gap.low):
        return f"{line} Not settled: {runs}."
    order = f", but every run of {arm} is {side} every run of {other}" if gap.side and not gap.settled else ""
    verdict = "Settled" if gap.settled else "Not settled"
    return f"{line} {verdict}: 95 % interval {interval(gap.low, gap.high, 3)}, {runs}{order}."


def _speedup(pair: Pair) -> str:
    """Return how much sooner an arm reached the other's level."""
    result, arm, other = pair.speedup, pair.arm.label, pair.other.label
    goal = f"99 % of {other}’s peak ({number(result.threshold)})"
    if math.isinf(result.arm_time):
        return f"{arm} never reached {goal}."
    unit = unit_for(result.baseline_time)
    times = f"after {duration(result.arm_time, unit)}, {other} after {duration(result.baseline_time, unit)}"
    spread = f" {interval(result.ci_low, result.ci_high)}".removesuffix(" –")
    settled = "settled" if result.settled else f"not settled{f', fewer than {FEW} runs' if result.runs < FEW else ''}"
    return f"{arm} reached {goal} {times}: a speedup of {number(result.speedup, 2)}x{spread}, {settled}."


def notes(analysis: Analysis) -> tuple[str, ...]:
    """Return the limitations of the numbers, each a sentence or two; empty if there are none."""
    found, runs = [], [run for arm in analysis.arms for run in arm.runs]
    states = Counter(run.state for run in runs if run.state != "finished")
    if states:
        parts = ", ".join(f"{count} {plain(state)}" for state, count in sorted(states.items()))
        unfinished = f"{states.total()} of {len(runs)} runs did not finish ({parts})."
        found.append(f"{unfinished} Each counts up to its last evaluation.")
    if lone := [arm.label for arm in analysis.arms if arm.is_single]:
        found.append(f"One run does not show how seeds differ. Its ± and band are over prompts: {', '.join(lone)}.")
    found += _baseline_notes(analysis)
    for arm in analysis.arms:
        found += [f"{arm.label}: {line}" for line in _curve_notes(analysis, arm)]
    if damage := damaged_files(analysis.arms):
        found.append(f"Skipped unreadable data: {damage}.")
    devices = Counter(plain(run.environment["device"]) for run in runs if run.environment.get("device"))
    if len(devices) > 1:
        parts = ", ".join(f"{count} on {device}" for device, count in devices.items())
        found.append(f"Runs used different devices ({parts}). Their times cannot be compared.")
    return tuple(found)


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
    if end and end.final_runs < len(curve.runs):
        found.append(f"its final score is the mean of {end.final_runs} of {len(curve.runs)} runs; the others ended.")
    if end and curve.due[curve.last()] < analysis.horizon * (1 - 1e-9):
        ends, horizon = duration(end.final_seconds), duration(analysis.horizon)
        found.append(f"it ends at {ends}. Scores are compared at {horizon}.")
    return found


def _baseline_notes(analysis: Analysis) -> list[str]:
    """Return why nothing is compared, or what is odd about the level that speedups are to."""
    base = analysis.baseline
    if len(analysis.arms) < 2:
        return []
    if base is None:
        return ["No baseline is set, so nothing is compared."]
    if base.curve is None or base.name not in analysis.finals:
        return [f"{base.label}, the baseline, has no evaluation that most of its runs share: nothing is compared."]
    if analysis.finals[base.name].peak_seconds <= float(np.nanmin(base.curve.times)):
        return [f"{base.label} peaks at its first evaluation: its level does not show what training gains."]
    return []


def method(analysis: Analysis) -> tuple[str, ...]:
    """Return how the numbers were computed, in sentences."""
    lines = [
        "Time is the training clock, without evaluation. Checkpoints of different runs are matched by their nominal "
        "second. A mean needs more than half of an arm’s runs. A run that failed counts up to its last evaluation. "
        f"Intervals of scores are 1.96 standard errors over runs, as in the paper; with fewer than {FEW} runs they are "
        "too narrow.",
    ]
    if any(arm.config.get("clock") == "cpu" for arm in analysis.arms):
        lines.append("Time is processor time of the training process, without that of its reward processes.")
    if analysis.pairs:
        lines += [
            "A difference of scores has Welch’s 95 % interval over runs, which also allows for the standard error of "
            "the evaluations. It is settled if the interval excludes 0.",
            "A speedup follows the authors’ rule: the time at which the other arm’s mean curve first reaches 99 % of "
            "its maximum, over the time at which this arm’s does. Its interval is a bootstrap over runs. A resample "
            "in which the arm never reaches the level counts as 0. It is settled if the interval excludes 1 and both "
            f"arms have at least {FEW} runs.",
        ]
    return tuple(lines)
