"""The sentences of a report: the headline, and what a reader must know to trust the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .damage import damage_note
from .resampling import FEW, Speedup
from .statistics import Z_95
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
    # what the runs settle comes first
    found.sort(key=lambda pair: (not (pair[0].settled and pair[0].speedup > 1), -pair[0].speedup))
    reached = [pair for pair in found if math.isfinite(pair[0].arm_time)]
    never = [pair for pair in found if not math.isfinite(pair[0].arm_time)]
    lines = [_comparison(analysis, base, arm, result) for result, arm in reached[:_NAMED]]
    if len(reached) > _NAMED:
        rest = ", ".join(
            f"{arm.label} ({number(result.speedup, 2)}x{'' if result.settled else ', not settled'})"
            for result, arm in reached[_NAMED:]
        )
        lines.append(f"Also reached it: {rest}.")
    if len(never) == 1:
        lines.append(_comparison(analysis, base, never[0][1], never[0][0]))
    elif never:
        lines.append(_never(analysis, base, never, alone=not reached))
    return tuple(lines)


def _trained(arm: Arm) -> bool:
    """Whether an arm was evaluated after its start: of one that was not there is nothing to say but that."""
    return arm.curve is not None and arm.curve.due[arm.curve.last()] > 0


def _never(analysis: Analysis, base: Arm, never: Sequence[tuple[Speedup, Arm]], *, alone: bool) -> str:
    result = analysis.speedup_of(base.name)
    assert result is not None
    names = ", ".join(f"{arm.label} ({number(analysis.finals[arm.name].final)})" for _, arm in never)
    goal = f"99 % of {base.label}’s peak {words(analysis.metric)} ({number(result.threshold)})"
    who = f"None of the {len(never)} arms" if alone else f"{len(never)} arms never"
    line = f"{who} reached {goal} in {duration(analysis.horizon)}; final scores: {names}."
    unsettled = [arm for found, arm in never if not found.settled]
    if not unsettled:
        return line
    which = "" if len(unsettled) == len(never) else f" for {', '.join(arm.label for arm in unsettled)}"
    return f"{line} Not settled{which}: {_SINGLE if _single(base, *unsettled) else 'their intervals include 1'}."


def _progress(analysis: Analysis, arm: Arm) -> str:
    end = analysis.finals[arm.name]
    spread = "" if math.isnan(end.low) else f" {interval(end.low, end.high, 3)}"
    if _single(arm) and not math.isnan(end.error):
        spread = f" ± {number(Z_95 * end.error)} (1.96 standard errors of the evaluation)"
    return (
        f"{arm.label} went from {number(end.start)} to {number(end.final)}{spread} {words(analysis.metric)} "
        f"in {duration(end.final_seconds)}, {_runs(arm)}."
    )


def _comparison(analysis: Analysis, base: Arm, arm: Arm, result: Speedup) -> str:
    """What the runs say of an arm against the baseline: who is sooner where they settle it, else the numbers alone."""
    goal = f"99 % of {base.label}’s peak {words(analysis.metric)}"
    count = f"{_runs(arm)}" if arm.run_count == base.run_count else f"{_runs(arm)} against {base.run_count}"
    doubt = _doubt(base, arm, result)
    if math.isinf(result.arm_time):
        end = analysis.finals[arm.name]
        level, time = number(result.threshold), duration(end.final_seconds)
        return f"{arm.label} never reached {goal} ({level}) in {time}, {count}.{doubt and ' Not settled: ' + doubt}"
    if math.isinf(result.speedup):
        first = f"{arm.label} was at {goal} from its first evaluation on"
        return f"{first}, {count}.{doubt and ' Not settled: ' + doubt}"
    if result.speedup == 0:
        first = f"{arm.label} reached {goal} after {duration(result.arm_time)}; {base.label} was there"
        return f"{first} from its first evaluation on, {count}.{doubt and ' Not settled: ' + doubt}"
    unit = unit_for(max(result.arm_time, result.baseline_time))
    arm_time, base_time = duration(result.arm_time, unit), duration(result.baseline_time, unit)
    spread = interval(result.ci_low, result.ci_high)
    shown = "" if spread == "–" else f" {spread}"
    if doubt:
        speedup = f"speedup {result.speedup:.2f}{shown}"
        times = f"after {arm_time}, {base.label} after {base_time} ({speedup}), {count}."
        numbers = f"{_zeros(result)}{_ends(analysis, base, arm)}"
        return f"Not settled: {arm.label} reached {goal} {times} {_capital(doubt)}{numbers}"
    how = f"{result.speedup:.2f}x sooner{shown}"
    if result.speedup < 1:
        how = f"{1 / result.speedup:.2f}x later (speedup {result.speedup:.2f}{shown})"
    return f"{arm.label} reached {goal} {how}: {arm_time} against {base_time}, {count}.{_zeros(result)}"


_SINGLE = "one run of an arm cannot tell a difference from chance"


def _single(*arms: Arm) -> bool:
    return any(arm.curve is not None and len(arm.curve.runs) == 1 for arm in arms)


def _doubt(base: Arm, arm: Arm, result: Speedup) -> str:
    """Why the runs do not settle which arm is sooner; empty where they do."""
    if result.settled:
        return ""
    if _single(base, arm):
        return f"{_SINGLE}."
    if result.includes_one:
        return "the interval includes 1."
    curves = [curve for curve in (base.curve, arm.curve) if curve]
    causes = ["so few runs"] if any(len(curve.runs) < FEW for curve in curves) else []
    causes += ["the evaluation’s standard error"] if any(not np.isnan(curve.errors).all() for curve in curves) else []
    wide = interval(result.cautious_low, result.cautious_high)
    return f"with {' and '.join(causes)} allowed for, the interval is {wide}."


def _share(result: Speedup) -> str:
    """Beside an interval: how many resamples count as 0, and the interval of the others."""
    others = interval(result.reached_low, result.reached_high)
    return f"{100 * result.never_reached:.1f} %{'' if others == '–' else f', the others give {others}'}"


def _zeros(result: Speedup) -> str:
    return f" Resamples that never reach it count as 0: {_share(result)}." if result.never_reached > 0 else ""


def _ends(analysis: Analysis, base: Arm, arm: Arm) -> str:
    """The final scores of two arms, with the evaluation's standard error where a run stands alone."""
    ends = [analysis.finals[one.name] for one in (arm, base)]
    errors = [f" ± {number(Z_95 * end.error)}" if _single(one) and not math.isnan(end.error) else ""
              for end, one in zip(ends, (arm, base), strict=True)]  # fmt: skip
    own, other = (f"{number(end.final)}{error}" for end, error in zip(ends, errors, strict=True))
    what = " (± 1.96 standard errors of the evaluation)" if any(errors) else ""
    return f" At {duration(analysis.horizon)}: {own} against {other}{what}."


def notes(analysis: Analysis) -> tuple[str, ...]:
    """What limits the numbers of this report, each a sentence; empty when nothing does."""
    found = [*_run_notes(analysis), *_curve_notes(analysis), *_baseline_notes(analysis)]
    if damage := damage_note(analysis.arms, (analysis.metric, f"{analysis.metric}_se", "prompts")):
        found.append(damage)
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
        if any(_single(arm) and not np.isnan(arm.curve.errors).all() for arm in analysis.arms if arm.curve):
            found.append("Of one run, ± and bands are 1.96 standard errors of an evaluation over its prompts alone.")
    curved = [arm for arm in analysis.arms if arm.curve]
    few = [arm.label for arm in curved if arm.curve and 1 < len(arm.curve.runs) < FEW]
    if few:
        who = "all arms" if len(few) == len(curved) else ", ".join(few)
        found.append(f"Intervals over fewer than {FEW} runs are narrower than they should be: {who}.")
    return found


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
        if curve.interpolated:
            found.append(
                f"{arm.label}: its runs were evaluated at times of their own. Their scores are interpolated linearly "
                f"to {len(curve.due)} common times."
            )
        if curve.thinned_from:
            found.append(
                f"{arm.label}: {len(curve.due):,} of its {curve.thinned_from:,} checkpoints are used, evenly spread."
            )
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
    others = [s for arm in analysis.arms if arm is not base and (s := analysis.speedup_of(arm.name)) and s.speedup > 0]
    if len(others) > 1 and any(s.settled and s.speedup > 1 for s in others):
        found.append(f"The headline names the largest of {len(others)} speedups, which flatters it; the table has all.")
    zero = [(arm.label, s) for arm in analysis.arms if (s := analysis.speedup_of(arm.name)) and s.never_reached > 0]
    if zero:
        parts = "; ".join(f"{label} {_share(result)}" for label, result in zero[:_NAMED])
        more = f"; {len(zero) - _NAMED} more arms in the table" if len(zero) > _NAMED else ""
        found.append(f"In an interval, a resample that never reaches the level counts as 0: {parts}{more}.")
    return found


def _runs(arm: Arm) -> str:
    return f"{arm.run_count} run{'' if arm.run_count == 1 else 's'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def words(metric: str) -> str:
    """``answer_accuracy`` as a reader says it.

    >>> words("answer_accuracy"), words("both_accuracy")
    ('answer accuracy', 'answer and format right')
    """
    return _WORDS.get(metric) or plain(metric).replace("_", " ")


_WORDS = {"both_accuracy": "answer and format right", "mean_completion_tokens": "mean completion length (tokens)"}
