"""The sentences of a report: headlines, what limits the numbers, and how they were computed."""

from __future__ import annotations

import math
from collections import Counter

from ..text import counted
from .analysis import Analysis, Pair
from .arms import Arm, damaged_files
from .comparable import refusal, remarks
from .intervals import Z_95
from .statistics import FLAT, SHORT
from .text import duration, interval, number, plain, unit_for, words

_NAMED = 6  # pairs or arms that get a line of their own


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Return a line for each of the first pairs of arms, then the speedup of the one that the experiment is about.

    Without a pair: the first and last score of each arm.
    """
    pairs = analysis.pairs
    if not pairs:
        scored = [arm for arm in analysis.arms if arm.name in analysis.finals]
        scored.sort(key=lambda arm: -analysis.finals[arm.name].final)
        found = tuple(_progress(analysis, arm) for arm in scored[:_NAMED])
        return found or (f"No evaluation of {plain(analysis.metric)} yet.",)
    return (*(_scores(analysis, pair) for pair in pairs[:_NAMED]), _speedup(pairs[0]))


def _trained(arm: Arm) -> bool:
    """Whether an arm was evaluated after its start."""
    return arm.curve is not None and arm.curve.end > 0


def _progress(analysis: Analysis, arm: Arm) -> str:
    """Return the first and last score of an arm."""
    end = analysis.finals[arm.name]
    what = words(analysis.metric)
    runs = counted(arm.run_count, "run")
    if arm.unfinished:
        runs += f" ({arm.unfinished})"
    if not _trained(arm):
        return f"{arm.label} starts at {number(end.start)} {what}, {runs}."
    spread = f" {interval(end.low, end.high, 3)}".removesuffix(" –")
    if arm.is_single and not math.isnan(end.error):
        spread = f" ± {number(Z_95 * end.error)}"
    times = f"in {duration(end.final_seconds)}, {runs}"
    return f"{arm.label} went from {number(end.start)} to {number(end.final)}{spread} {what} {times}."


def _scores(analysis: Analysis, pair: Pair) -> str:
    """Return who is higher and by how much, and in a second sentence whether to believe it."""
    arm = pair.arm.label
    other = pair.other.label
    gap = pair.difference
    side = "above" if gap.mean >= 0 else "below"
    place = f"{abs(gap.mean):.3f} {side}" if round(gap.mean, 3) else "level with"
    early = _ends_earlier(pair)
    verb = "is" if early else "ends"
    scores = f"{words(analysis.metric)} {number(pair.score)} against {number(pair.other_score)}"
    line = f"{early}{arm} {verb} {place} {other}: {scores}."
    runs = _runs_of(pair)
    if math.isnan(gap.low):
        return f"{line} Not settled: {runs}."
    order = f", but every run of {arm} is {side} every run of {other}" if gap.side and not gap.settled else ""
    verdict = "Settled" if gap.settled else "Not settled"
    return f"{line} {verdict}: 95 % interval {interval(gap.low, gap.high, 3)}, {runs}{order}."


def _ends_earlier(pair: Pair) -> str:
    """Return the time of a comparison before the end of an arm, and which arm ends there; empty at the end of both."""
    ends = {arm.label: arm.curve.end for arm in (pair.arm, pair.other) if arm.curve}
    if max(ends.values()) <= pair.due * (1 + 1e-9):
        return ""
    unit = unit_for(max(ends.values()))
    enders = [label for label, end in ends.items() if end <= pair.due * (1 + 1e-9)]
    where = f", where {enders[0]} ends" if enders else ""
    return f"At {duration(pair.due, unit)}{where}, "


def _runs_of(pair: Pair) -> str:
    """Return how many runs a comparison is over, and how many of the arms' runs did not finish."""
    if pair.runs == pair.other_runs:
        text = f"{counted(pair.runs, 'run')} each"
    else:
        text = f"{pair.runs} and {counted(pair.other_runs, 'run')}"
    unfinished = [f"{arm.label}: {arm.unfinished}" for arm in (pair.arm, pair.other) if arm.unfinished]
    return f"{text} ({'; '.join(unfinished)})" if unfinished else text


def _speedup(pair: Pair) -> str:
    """Return how much sooner an arm reached the other's level."""
    result = pair.speedup
    arm = pair.arm.label
    other = pair.other.label
    goal = f"99 % of {other}’s peak ({number(result.threshold)})"
    if result.problem == FLAT:
        level = number(result.threshold)
        return f"No speedup: {other} has 99 % of its own peak ({level}) at its first evaluation already."
    unit = unit_for(result.baseline_time)
    if result.problem == SHORT:
        ends = duration(result.arm_end, unit)
        return (
            f"No speedup: {arm} ends at {ends}, below {goal}, which {other} reaches after "
            f"{duration(result.baseline_time, unit)}."
        )
    if math.isinf(result.arm_time):
        high = "" if math.isnan(result.ci_high) else f" Its speedup is at most {number(result.ci_high, 2)}x."
        return f"{arm} never reached {goal}." + (high if result.ci_high > 0 else "")
    if result.arm_time <= 0:
        return f"{arm} has {goal} at its first evaluation, {other} after {duration(result.baseline_time, unit)}."
    times = f"after {duration(result.arm_time, unit)}, {other} after {duration(result.baseline_time, unit)}"
    spread = f" {interval(result.ci_low, result.ci_high)}".removesuffix(" –")
    settled = "settled" if result.settled else "not settled"
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
    found += remarks(analysis.compared)
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
    duplicates = [seed for seed, count in Counter(arm.seeds).items() if count > 1]
    if duplicates and arm.runs:
        found.append(f"several of its runs have seed {plain(duplicates[0])}. They may not be independent.")
    return found


def _baseline_notes(analysis: Analysis) -> list[str]:
    """Return why nothing is compared, or what is odd about the level that speedups are to."""
    base = analysis.baseline
    if len(analysis.arms) < 2:
        return []
    if base is None:
        return ["No baseline is set, so nothing is compared.", *_mixed(analysis)]
    if base.curve is None or base.name not in analysis.finals:
        return [f"{base.label}, the baseline, has no evaluation that most of its runs share: nothing is compared."]
    found = []
    for arm in analysis.arms:
        if arm.name in analysis.refused:
            found.append(f"{arm.label} is not compared with {base.label}: {analysis.refused[arm.name]}.")
    level = analysis.speedup_of(base.name)
    if level and level.problem == FLAT:
        found.append(
            f"{base.label} has 99 % of its peak at its first evaluation: no speedup can be measured against it."
        )
    early = {pair.arm.label: pair for pair in analysis.pairs if pair.other is base and _ends_earlier(pair)}
    for label, pair in early.items():
        found.append(f"{label} and {base.label} end at different times. They are compared at {duration(pair.due)}.")
    counts = {arm.label: arm.run_count for arm in analysis.compared}
    if len({*counts.values()}) > 1:
        parts = ", ".join(f"{label} {count}" for label, count in counts.items())
        found.append(f"Arms have different numbers of runs: {parts}.")
    return found


def _mixed(analysis: Analysis) -> list[str]:
    """Return why scores next to each other cannot be compared by eye either."""
    scored = [arm for arm in analysis.arms if arm.name in analysis.finals]
    for arm in scored[1:]:
        reason = refusal(scored[0], arm)
        if reason:
            return [f"Scores of {scored[0].label} and {arm.label} cannot be compared: {reason}."]
    return []


def method(analysis: Analysis) -> tuple[str, ...]:
    """Return how the numbers were computed, in sentences."""
    lines = [
        "Time is the training clock, without evaluation. Checkpoints of different runs are matched by their nominal "
        "second. A mean needs more than half of an arm’s runs. A run that failed counts up to its last evaluation. "
        "Every interval is Student’s 95 % interval over runs. It also allows for the standard error of the evaluations "
        "where runs differ by less.",
    ]
    if any(arm.config.get("clock") == "cpu" for arm in analysis.arms):
        lines.append("Time is processor time of the training process, without that of its reward processes.")
    if analysis.pairs:
        lines += [
            "Arms are compared at the last time at which both have scores. The interval of a difference is over the "
            "differences of equal seeds. Where the arms have different seeds, it is Welch’s. A difference is settled "
            "if the interval excludes 0.",
            "A speedup follows the authors’ rule: the time at which the other arm’s mean curve first reaches 99 % of "
            "its maximum, over the time at which this arm’s does. Its interval ends where this arm’s score first may "
            "be, and first is, at that level by the same interval of the difference. It begins at 0 if the arm may "
            "never reach the level. A speedup is settled if the interval excludes 1.",
        ]
    return tuple(lines)
