"""The sentences of a report: headlines, what limits the numbers, and how they were computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .analysis import Analysis
from .arms import Arm, damaged_files, plans_of
from .speedups import FEW, Speedup
from .statistics import Z_95
from .text import capital, duration, interval, number, plain, plural, unit_for, words

_NAMED = 4  # arms that get a sentence of their own
_SINGLE = "one run of an arm cannot tell a difference from chance"

Compared = tuple[Arm, Speedup]


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Return a sentence on each arm against the baseline: settled results first, then by speedup.

    Without a baseline, or an arm to compare with it: the first and last score of each arm.
    """
    base = analysis.baseline
    if base is None or analysis.speedup_of(base.name) is None:
        scored = [arm for arm in analysis.arms if arm.name in analysis.finals]
        scored.sort(key=lambda arm: -analysis.finals[arm.name].final)
        return tuple(_progress(analysis, arm) for arm in scored) or (f"No evaluation of {analysis.metric} yet.",)
    found = [
        (arm, result)
        for arm in analysis.arms
        if arm is not base and _trained(arm) and (result := analysis.speedup_of(arm.name))
    ]
    if not found:
        return (_progress(analysis, base),)
    found.sort(key=lambda pair: (not (pair[1].settled and pair[1].speedup > 1), -pair[1].speedup))
    reached = [pair for pair in found if math.isfinite(pair[1].arm_time)]
    never = [pair for pair in found if math.isinf(pair[1].arm_time)]
    lines = [_comparison(analysis, base, *pair) for pair in reached[:_NAMED]]
    if rest := reached[_NAMED:]:
        others = (f"{arm.label} ({number(s.speedup, 2)}x{'' if s.settled else ', not settled'})" for arm, s in rest)
        lines.append(f"Also reached it: {', '.join(others)}.")
    if never:
        lines.append(_never(analysis, base, never, alone=not reached))
    return tuple(lines)


def _trained(arm: Arm) -> bool:
    """Whether an arm was evaluated after its start."""
    return arm.curve is not None and arm.curve.due[arm.curve.last()] > 0


def _goal(analysis: Analysis, base: Arm) -> str:
    return f"99 % of {base.label}’s peak {words(analysis.metric)}"


def _never(analysis: Analysis, base: Arm, never: Sequence[Compared], *, alone: bool) -> str:
    arms = [arm for arm, _ in never]
    finals = [analysis.finals[arm.name] for arm in arms]
    goal = f"{_goal(analysis, base)} ({number(never[0][1].threshold)})"
    time = duration(max(final.final_seconds for final in finals))
    if len(arms) == 1:
        line = f"{arms[0].label} never reached {goal} in {time}; final score {number(finals[0].final)}, {_runs(*arms)}."
    else:
        who = f"None of the {len(arms)} arms" if alone else f"{len(arms)} arms never"
        scores = ", ".join(f"{arm.label} ({number(final.final)})" for arm, final in zip(arms, finals, strict=True))
        line = f"{who} reached {goal} in {time}; final scores: {scores}."
    doubts: dict[str, list[str]] = {}
    for arm, result in never:
        if not result.settled:
            doubts.setdefault(_doubt(base, arm, result), []).append(arm.label)
    if not doubts:
        return line
    why = (doubt if len(of) == len(arms) else f"{doubt} ({', '.join(of)})" for doubt, of in doubts.items())
    return f"{line} Not settled: {'; '.join(why)}."


def _progress(analysis: Analysis, arm: Arm) -> str:
    end = analysis.finals[arm.name]
    spread = "" if math.isnan(end.low) else f" {interval(end.low, end.high, 3)}"
    if _error_of(analysis, arm):
        spread = f"{_error_of(analysis, arm)} (1.96 standard errors of the evaluation)"
    return (
        f"{arm.label} went from {number(end.start)} to {number(end.final)}{spread} {words(analysis.metric)} "
        f"in {duration(end.final_seconds)}, {_runs(arm)}."
    )


def _error_of(analysis: Analysis, arm: Arm) -> str:
    """``± 0.047`` for the final score of a single run whose evaluation has a standard error."""
    error = analysis.finals[arm.name].error
    return f" ± {number(Z_95 * error)}" if arm.is_single and not math.isnan(error) else ""


def _comparison(analysis: Analysis, base: Arm, arm: Arm, result: Speedup) -> str:
    """An arm that reached the level: sooner or later if the runs settle it, else the numbers alone."""
    unit = unit_for(max(result.arm_time, result.baseline_time))
    spread = f" {interval(result.ci_low, result.ci_high)}" if result.has_interval else ""
    reached, runs = f"{arm.label} reached {_goal(analysis, base)}", _runs(arm, base)
    zeros = f" Resamples that never reach it count as 0 ({_share(result)})." if result.never_reached > 0 else ""
    if result.settled and 0 < result.speedup < math.inf:
        how = f"{result.speedup:.2f}x sooner{spread}"
        if result.speedup < 1:
            how = f"{1 / result.speedup:.2f}x later (speedup {result.speedup:.2f}{spread})"
        times = f"{duration(result.arm_time, unit)} against {duration(result.baseline_time, unit)}"
        return f"{reached} {how}: {times}, {runs}.{zeros}"

    def when(seconds: float) -> str:
        return f"after {duration(seconds, unit)}" if seconds > 0 else "at its first evaluation"

    line = f"{reached} {when(result.arm_time)}, {base.label} {when(result.baseline_time)}"
    if 0 < result.speedup < math.inf:
        line += f" (speedup {result.speedup:.2f}{spread})"
    if result.settled:
        return f"{line}, {runs}."
    own, other = (f"{number(analysis.finals[one.name].final)}{_error_of(analysis, one)}" for one in (arm, base))
    what = " (± 1.96 standard errors of the evaluation)" if "±" in own + other else ""
    ends = f"At {duration(analysis.horizon)}: {own} against {other}{what}."
    return f"Not settled: {line}, {runs}. {capital(_doubt(base, arm, result))}.{zeros} {ends}"


def _doubt(base: Arm, arm: Arm, result: Speedup) -> str:
    """Return why the runs do not settle which arm is faster."""
    if base.is_single or arm.is_single:
        return _SINGLE
    if result.includes_one:
        return "the interval includes 1"
    curves = [curve for curve in (base.curve, arm.curve) if curve]
    causes = ["so few runs"] if any(len(curve.runs) < FEW for curve in curves) else []
    causes += ["the evaluation’s standard error"] if any(curve.has_errors for curve in curves) else []
    wide = interval(result.cautious_low, result.cautious_high)
    return f"allowing for {' and '.join(causes)}, the interval is {wide}"


def _share(result: Speedup) -> str:
    """Return the share of resamples that count as 0, and the interval of the others."""
    others = interval(result.reached_low, result.reached_high)
    return f"{100 * result.never_reached:.1f} %{'' if others == '–' else f'; the others give {others}'}"


def _runs(arm: Arm, base: Arm | None = None) -> str:
    runs = plural(arm.run_count, "run")
    return runs if base is None or arm.run_count == base.run_count else f"{runs} against {base.run_count}"


# ------------------------------------------------------------------------------------------- notes


def notes(analysis: Analysis) -> tuple[str, ...]:
    """Return the limitations of the numbers, each a sentence or two; empty if there are none."""
    found = [*_run_notes(analysis), *_interval_notes(analysis)]
    for arm in analysis.arms:
        found += _curve_notes(analysis, arm)
    found += _baseline_notes(analysis)
    if damage := damaged_files(analysis.arms, (analysis.metric, f"{analysis.metric}_se", "prompts")):
        found.append(f"Skipped unreadable data: {damage}.")
    devices = Counter(plain(run.environment["device"]) for run in analysis.runs if run.environment.get("device"))
    if len(devices) > 1:
        parts = ", ".join(f"{count} on {device}" for device, count in devices.items())
        found.append(f"Runs used different devices ({parts}): their times cannot be compared.")
    return tuple(found)


def _run_notes(analysis: Analysis) -> list[str]:
    """Runs that are missing, that did not finish, or that were made again."""
    found = []
    absent = {arm.label: len(arm.missing) for arm in analysis.arms if arm.missing}
    if absent:
        planned = sum(absent.values()) + sum(arm.run_count for arm in analysis.arms)
        parts = ", ".join(f"{count} of {label}" for label, count in absent.items())
        found.append(f"{sum(absent.values())} of {planned} planned runs are missing ({parts}; see Runs).")
    whole = [arm.label for arm in analysis.arms if arm.missing and not arm.runs]
    if whole:
        they = "it is" if len(whole) == 1 else "they are"
        found.append(f"No run of {', '.join(whole)} has begun: {they} in no figure.")
    states = Counter(run.state for run in analysis.runs if run.state != "finished")
    if states:
        parts = ", ".join(f"{count} {plain(state)}" for state, count in sorted(states.items()))
        unfinished = f"{sum(states.values())} of {len(analysis.runs)} runs did not finish ({parts}; see Runs)."
        found.append(f"{unfinished} Each counts up to its last evaluation.")
    found += [line for arm in analysis.arms if (line := plans_of(arm))]
    if analysis.attempts:
        attempts = plural(analysis.attempts, "earlier attempt")
        found.append(f"Not counted: {attempts} of runs that failed or were stopped, kept in .attempts.")
    return found


def _interval_notes(analysis: Analysis) -> list[str]:
    """Arms with too few runs for an interval."""
    found = []
    curved = [(arm, arm.curve) for arm in analysis.arms if arm.curve]
    lone = [arm.label for arm, curve in curved if curve.is_single]
    if lone:
        found.append(f"No interval can be given for arms with one run: {', '.join(lone)}.")
    if any(curve.is_single and curve.has_errors for _, curve in curved):
        found.append("For a single run, ± and bands are 1.96 standard errors of its evaluation over the prompts.")
    few = [arm.label for arm, curve in curved if 1 < len(curve.runs) < FEW]
    if few:
        who = "all arms" if len(few) == len(curved) else ", ".join(few)
        found.append(f"Intervals over fewer than {FEW} runs are narrower than they should be: {who}.")
    return found


def _curve_notes(analysis: Analysis, arm: Arm) -> list[str]:
    """Return what is missing from an arm's curve."""
    found = []
    curve, metric = arm.curve, analysis.metric
    silent = arm.run_count - (len(curve.runs) if curve else 0)
    if silent:
        found.append(f"{silent} of {arm.run_count} runs have no evaluation of {metric} and are in no curve.")
    if curve and not _trained(arm):
        found.append("no evaluation after its start; it is in no headline.")
    if curve and curve.interpolated:
        found.append(
            "its runs were evaluated at different times. Their scores are interpolated linearly to "
            f"{len(curve.due)} common times."
        )
    if curve and curve.thinned_from:
        found.append(f"{len(curve.due):,} of its {curve.thinned_from:,} checkpoints are used, evenly spread.")
    if curve and (thin := int(np.isnan(curve.mean).sum())):
        found.append(
            f"half of its runs or fewer have {thin} of the {len(curve.due)} checkpoints. These are drawn run by run "
            "and are in no mean."
        )
    end = analysis.finals.get(arm.name)
    if curve and end and end.final_runs < len(curve.runs):
        found.append(f"its final score is the mean of the {end.final_runs} of {len(curve.runs)} runs that got so far.")
    if curve and end and curve.due[curve.last()] < analysis.horizon * (1 - 1e-9):
        ends, horizon = duration(end.final_seconds), duration(analysis.horizon)
        found.append(f"it ends at {ends}; scores are compared at {horizon}.")
    return [f"{arm.label}: {line}" for line in found]


def _baseline_notes(analysis: Analysis) -> list[str]:
    base = analysis.baseline
    if base is None:
        return ["No baseline is set, so no speedup is computed."] if len(analysis.arms) > 1 else []
    result = analysis.speedup_of(base.name, "peak")
    if result is None or base.curve is None:
        what = "no checkpoint that most of its runs share" if base.curve else "no evaluation"
        return [f"{base.label}, the baseline, has {what}, so no speedup is computed."]
    found = []
    if result.arm_time <= float(np.nanmin(base.curve.times)):
        found.append(f"{base.label} peaks at its first evaluation: its level says nothing about training.")
    pairs = [(arm, s) for arm in analysis.arms if (s := analysis.speedup_of(arm.name))]
    others = [s for arm, s in pairs if arm is not base and s.speedup > 0]
    if len(others) > 1 and any(s.settled and s.speedup > 1 for s in others):
        found.append(f"The headline names the largest of {len(others)} speedups, which overstates it: see the table.")
    zero = [f"{arm.label} ({_share(s)})" for arm, s in pairs if s.never_reached > 0]
    if zero:
        more = f", {len(zero) - _NAMED} more arms in the table" if len(zero) > _NAMED else ""
        parts = ", ".join(zero[:_NAMED]) + more
        found.append(f"In an interval, a resample that never reaches the level counts as 0: {parts}.")
    return found


def method(analysis: Analysis) -> tuple[str, ...]:
    """How the numbers were computed, in sentences."""
    lines = [
        "Time is the training clock, without evaluation. A checkpoint’s time is the mean over runs of the real seconds "
        "at which it was made; checkpoints of different runs are matched by their nominal second.",
        "Intervals of scores are 1.96 standard errors over runs, as in the paper (final.csv has the bootstrap’s too). "
        "An arm with one run has the standard error of its evaluation over the prompts (evaluation_se in final.csv), "
        "which says nothing about other runs. A checkpoint that half of an arm’s runs or fewer have is in no mean. "
        "Every run counts: one that failed or was killed counts as far as it got.",
    ]
    if any(arm.config.get("clock") == "cpu" for arm in analysis.arms):
        lines.append("Time is processor time of the training process, without that of its reward processes.")
    if any(arm.curve and arm.curve.interpolated for arm in analysis.arms):
        lines.append(
            "Where the runs of an arm were evaluated at times of their own, scores are interpolated linearly between "
            "the evaluations of each run, at common times. On a shared clock nothing is interpolated."
        )
    if analysis.speedups:
        lines += [
            "Speedup follows the authors’ rule: T is 0.99 times the maximum of the baseline’s mean curve, and the "
            "speedup is the time of the baseline’s first checkpoint at T over that of the arm’s. speedup.csv also has "
            "the peak itself as T, and linear crossings between checkpoints.",
            f"Its interval is the 2.5 and 97.5 percentile of {analysis.resamples} bootstrap resamples (seed "
            f"{analysis.seed}). Each draws runs of the baseline and of the arm independently and computes T anew. A "
            "resample that never reaches T (most of its runs may have died) counts as speedup 0. The interval of the "
            "other resamples is the authors’ own (reached_low and reached_high in final.csv).",
            "A difference is settled when this interval excludes 1, and so does a wider one that allows for few runs "
            f"(below {FEW} runs deviations are widened as by Student’s t) and for the evaluation’s standard error "
            "(where runs differ by less than it). A single run settles nothing.",
        ]
    return tuple(lines)
