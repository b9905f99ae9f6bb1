"""The sentences of a report: the headline, and what a reader must know to trust the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .statistics import Speedup
from .text import duration, interval, number, plain, unit_for

if TYPE_CHECKING:
    from .analysis import Analysis
    from .arms import Arm


_NAMED = 4  # arms that get a sentence of their own


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Sentences on the arms, largest speedup first, and on those that never got there; none is left out.

    Without a baseline: the first and last score of each arm.
    """
    base = analysis.baseline
    if base is None or analysis.speedup_of(base.name) is None:
        ranked = sorted(analysis.finals, key=lambda name: -analysis.finals[name].final)
        arms = {arm.name: arm for arm in analysis.arms}
        return tuple(_progress(analysis, arms[name]) for name in ranked)
    found = [
        (s, arm) for arm in analysis.arms if arm is not base and _trained(arm) and (s := analysis.speedup_of(arm.name))
    ]
    if not found:
        return (_progress(analysis, base),)
    found.sort(key=lambda pair: -pair[0].speedup)
    reached = [pair for pair in found if math.isfinite(pair[0].arm_time)]
    never = found[len(reached) :]
    lines = [_comparison(analysis, base, arm, result) for result, arm in reached[:_NAMED]]
    if len(reached) > _NAMED:
        rest = ", ".join(f"{arm.label} ({number(result.speedup, 2)}x)" for result, arm in reached[_NAMED:])
        lines.append(f"Also reached it: {rest}.")
    if len(never) == 1:
        lines.append(_comparison(analysis, base, never[0][1], never[0][0]))
    elif never:
        lines.append(_never(analysis, base, [arm for _, arm in never], alone=not reached))
    return tuple(lines)


def _trained(arm: Arm) -> bool:
    """Whether an arm was evaluated after its start: of one that was not there is nothing to say but that."""
    return arm.curve is not None and arm.curve.due[arm.curve.last()] > 0


def _never(analysis: Analysis, base: Arm, arms: Sequence[Arm], *, alone: bool) -> str:
    result = analysis.speedup_of(base.name)
    assert result is not None
    names = ", ".join(f"{arm.label} ({number(analysis.finals[arm.name].final)})" for arm in arms)
    goal = f"99 % of {base.label}’s peak {words(analysis.metric)} ({number(result.threshold)})"
    who = f"None of the {len(arms)} arms" if alone else f"{len(arms)} arms never"
    return f"{who} reached {goal} in {duration(analysis.horizon)}; final scores: {names}."


def _progress(analysis: Analysis, arm: Arm) -> str:
    end = analysis.finals[arm.name]
    spread = "" if math.isnan(end.low) else f" {interval(end.low, end.high, 3)}"
    return (
        f"{arm.label} went from {number(end.start)} to {number(end.final)}{spread} {words(analysis.metric)} "
        f"in {duration(end.final_seconds)}, {_runs(arm)}."
    )


def _comparison(analysis: Analysis, base: Arm, arm: Arm, result: Speedup) -> str:
    goal = f"99 % of {base.label}’s peak {words(analysis.metric)}"
    count = f"{_runs(arm)}" if arm.run_count == base.run_count else f"{_runs(arm)} against {base.run_count}"
    if math.isinf(result.arm_time):
        end = analysis.finals[arm.name]
        level, time = number(result.threshold), duration(end.final_seconds)
        return f"{arm.label} never reached {goal} ({level}) in {time}, {count}."
    if math.isinf(result.speedup):
        return f"{arm.label} was at {goal} from its first evaluation on, {count}."
    if result.speedup == 0:
        after = duration(result.arm_time)
        return (
            f"{arm.label} reached {goal} after {after}; {base.label} was there from its first evaluation on, {count}."
        )
    spread = interval(result.ci_low, result.ci_high)
    unit = unit_for(max(result.arm_time, result.baseline_time))
    times = f"{duration(result.arm_time, unit)} against {duration(result.baseline_time, unit)}"
    if round(result.speedup, 2) > 1:
        how = f"{result.speedup:.2f}x sooner"
        how += "" if spread == "–" else f" {spread}"
    elif round(result.speedup, 2) < 1:
        speedup = f"{result.speedup:.2f}" + ("" if spread == "–" else f" {spread}")
        how = f"{1 / result.speedup:.2f}x later (speedup {speedup})"
    else:
        how = "no sooner and no later" + ("" if spread == "–" else f" (speedup 1.00 {spread})")
    settled = spread == "–" or not round(result.ci_low, 2) <= 1 <= round(result.ci_high, 2)
    doubt = "" if settled else " The interval includes 1: the difference is not settled."
    return f"{arm.label} reached {goal} {how}: {times}, {count}.{doubt}"


def notes(analysis: Analysis) -> tuple[str, ...]:
    """What limits the numbers of this report, each a sentence; empty when nothing does."""
    found = [*_run_notes(analysis), *_curve_notes(analysis), *_baseline_notes(analysis)]
    runs = [run for arm in analysis.arms for run in arm.runs]
    devices = Counter(plain(run.environment["device"]) for run in runs if run.environment.get("device"))
    if len(devices) > 1:
        parts = ", ".join(f"{count} on {device}" for device, count in devices.items())
        found.append(f"Runs used different devices ({parts}): their clocks do not compare.")
    return tuple(found)


def _run_notes(analysis: Analysis) -> list[str]:
    runs = [run for arm in analysis.arms for run in arm.runs]
    states = Counter(run.state for run in runs if run.state != "finished")
    found = [*_missing_notes(analysis)]
    if states:
        parts = ", ".join(f"{count} {plain(state)}" for state, count in sorted(states.items()))
        found.append(
            f"{sum(states.values())} of {len(runs)} runs did not finish ({parts}; see Runs). "
            "Each counts up to its last evaluation."
        )
    if analysis.attempts:
        was = (
            "1 run that failed or was stopped was"
            if analysis.attempts == 1
            else (f"{analysis.attempts} runs that failed or were stopped were")
        )
        found.append(f"{was} made again: what the earlier attempts left is kept in .attempts, and is in no figure.")
    for arm in analysis.arms:
        silent = arm.run_count - (len(arm.curve.runs) if arm.curve else 0)
        if silent:
            found.append(
                f"{arm.label}: {silent} of {arm.run_count} runs have no evaluation of {analysis.metric} "
                "and are in no curve."
            )
        if arm.curve and not _trained(arm):
            found.append(f"{arm.label} has no evaluation after its start and is in no headline.")
    lone = [arm.label for arm in analysis.arms if arm.curve and len(arm.curve.runs) == 1]
    if lone:
        found.append(f"No interval can be given for arms with one run: {', '.join(lone)}.")
    curved = [arm for arm in analysis.arms if arm.curve]
    few = [arm.label for arm in curved if arm.curve and 1 < len(arm.curve.runs) < _FEW]
    if few:
        who = "all arms" if len(few) == len(curved) else ", ".join(few)
        found.append(f"Intervals over fewer than {_FEW} runs are narrower than they should be: {who}.")
    return found


_FEW = 5  # the paper's smallest number of runs


def _missing_notes(analysis: Analysis) -> list[str]:
    absent = {arm.label: len(arm.missing) for arm in analysis.arms if arm.missing}
    if not absent:
        return []
    planned = sum(absent.values()) + sum(arm.run_count for arm in analysis.arms)
    whole = [arm.label for arm in analysis.arms if arm.missing and not arm.runs]
    parts = ", ".join(f"{count} of {label}" for label, count in absent.items())
    found = [f"{sum(absent.values())} of {planned} planned runs are missing ({parts}; see Runs)."]
    if whole:
        found.append(
            f"No run of {', '.join(whole)} has begun: {'it is' if len(whole) == 1 else 'they are'} in no figure."
        )
    return found


def _curve_notes(analysis: Analysis) -> list[str]:
    found = []
    for arm in analysis.arms:
        curve = arm.curve
        if not curve:
            continue
        thin = int(np.isnan(curve.mean).sum())
        if thin:
            found.append(
                f"{arm.label}: half of its runs or fewer have {thin} of the {len(curve.due)} checkpoints; "
                "those are drawn run by run, and are in no mean."
            )
        end = analysis.finals.get(arm.name)
        if end is None:
            continue
        if end.final_runs < len(curve.runs):
            found.append(
                f"{arm.label}: its final score is the mean of the {end.final_runs} of {len(curve.runs)} runs "
                "that got so far."
            )
        if curve.due[curve.last()] < analysis.horizon * (1 - 1e-9):
            ends, horizon = duration(end.final_seconds), duration(analysis.horizon)
            found.append(f"{arm.label} ends at {ends}; scores are compared at {horizon}.")
    return found


def _baseline_notes(analysis: Analysis) -> list[str]:
    base = analysis.baseline
    if base is None:
        return ["There is no baseline: no speedup is computed."] if len(analysis.arms) > 1 else []
    result = analysis.speedup_of(base.name, "peak")
    if result is None or base.curve is None:
        what = "no checkpoint that most of its runs share" if base.curve else "no evaluation"
        return [f"{base.label}, the baseline, has {what}: no speedup is computed."]
    found = []
    if result.arm_time <= float(np.nanmin(base.curve.times)):
        found.append(f"{base.label} peaks at its first evaluation: its level says nothing about training.")
    others = len(analysis.speedups) // 4 - 1
    if others > 1:
        found.append(f"The headline names the largest of {others} speedups, which flatters it; the table has all.")
    return found


def _runs(arm: Arm) -> str:
    return f"{arm.run_count} run{'' if arm.run_count == 1 else 's'}"


def words(metric: str) -> str:
    """``answer_accuracy`` as a reader says it.

    >>> words("answer_accuracy"), words("both_accuracy")
    ('answer accuracy', 'answer and format right')
    """
    return _WORDS.get(metric) or plain(metric).replace("_", " ")


_WORDS = {"both_accuracy": "answer and format right", "mean_completion_tokens": "mean completion length (tokens)"}
