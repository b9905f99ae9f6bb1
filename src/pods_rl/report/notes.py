"""The limitations of a report's numbers, and how they were computed, in sentences."""

from __future__ import annotations

from collections import Counter

from ..runs.speed import disturbed, speed_of
from ..text import counted
from .analysis import Analysis, ArmResult
from .arms import damaged_files
from .comparable import NOT_OF_THE_METHOD, machine_notes
from .intervals import FEWEST
from .ledger import Ledger
from .text import duration, listed, one_line, tally


def notes(analysis: Analysis, ledger: Ledger) -> tuple[str, ...]:
    """Return the limitations of the numbers, each a sentence or two; empty if there are none."""
    states = analysis.states
    run_count = states.total()
    del states["finished"]
    running = states.pop("running", 0)
    lines = []
    if running:
        lines.append(f"{running} of {run_count} runs still train, or were killed on another machine.")
    if states:
        lines.append(f"{states.total()} of {run_count} runs did not finish ({tally(sorted(states.items()))}).")
    if lines:
        lines[-1] += " Each counts up to its last evaluation."
    few = [arm.label for arm in analysis.arms if 0 < len(arm.curve.runs) < FEWEST]
    if few and (len(few) < len(analysis.arms) or not analysis.pairs):  # else the first finding says so
        lines.append(f"Fewer than {FEWEST} runs do not show how seeds differ, and have no interval: {listed(few)}.")
    if analysis.scored:
        lines += _baseline_notes(analysis)
        for result in analysis.results:
            for line in _curve_notes(analysis, result):
                lines.append(f"{result.arm.label}: {line}")
    damage = damaged_files(analysis.arms)
    if damage:
        lines.append(f"Skipped unreadable data: {damage}.")
    if ledger.unreadable:
        names = one_line(", ".join(ledger.unreadable), limit=300)
        lines.append(f"{len(ledger.unreadable)} of {ledger.files} rollout files could not be read: {names}.")
    lines += _speed_notes(analysis)
    lines += machine_notes({arm.label: arm.runs for arm in analysis.compared})
    return tuple(lines)


def _speed_notes(analysis: Analysis) -> list[str]:
    """Return which runs had a slower machine than the others that they are compared with."""
    speeds = {}
    for arm in analysis.compared:
        for run in arm.runs:
            speeds[f"{run.path.parent.name}/{run.path.name}"] = speed_of(run.evals)
    slow = disturbed(speeds)
    if not slow:
        return []
    named = listed([f"{run} {factor:.2f}" for run, factor in slow.items()])
    return [
        f"The machine was slower for {counted(len(slow), 'run')}: the speed check took this many times as long as "
        f"usual: {named}. Their times cannot be compared. Delete and repeat them with nothing else running."
    ]


def _curve_notes(analysis: Analysis, result: ArmResult) -> list[str]:
    """Return what is missing from an arm's curve."""
    arm = result.arm
    run_count = len(arm.curve.runs)
    lines = []
    if run_count < arm.run_count:
        missing = arm.run_count - run_count
        lines.append(f"{missing} of {arm.run_count} runs have no evaluation of {one_line(analysis.metric)}.")
    if run_count == 0:
        return lines
    if not arm.is_trained:
        lines.append("no evaluation after its start.")
    if result.final and result.final.final_runs < run_count:
        rest = ", since others still train" if arm.is_running else "; the others ended"
        lines.append(f"its final score is the mean of {result.final.final_runs} of {run_count} runs{rest}.")
    for seed, count in Counter(arm.seeds).items():
        if count > 1:
            lines.append(f"several of its runs have seed {one_line(seed)}. They may not be independent.")
            break
    return lines


def _baseline_notes(analysis: Analysis) -> list[str]:
    """Return why nothing is compared, or what is odd about the score that speedups are to."""
    base = analysis.baseline
    if len(analysis.results) < 2:
        return []
    if base is None:
        return ["Without a baseline nothing is compared."]
    if not base.has_scores:
        return [f"{base.label}, the baseline, has no evaluation that most of its runs share."]
    lines = [f"{arm.label} is not compared with {rival.label}: {reason}." for arm, rival, reason in analysis.refused]
    if analysis.target is None:
        lines.append(
            f"{base.label} rises to within 1 % of its peak by no more than the interval of this rise: no speedup can "
            "be measured against it."
        )
    for pair in analysis.pairs:
        if pair.is_early:
            ends = "have trained for different times so far" if pair.is_running else "end at different times"
            lines.append(f"{pair.arm.label} and {pair.rival.label} {ends}. They are compared at {duration(pair.due)}.")
        other_keys = [key for key in pair.differs_in if key in NOT_OF_THE_METHOD]
        if other_keys:
            keys = ", ".join(other_keys)
            lines.append(f"{pair.arm.label} and {pair.rival.label} differ in {keys} too, not in the method alone.")
    counts = {arm.run_count for arm in analysis.compared}
    if len(counts) > 1:
        parts = [f"{arm.label} {arm.run_count}" for arm in analysis.compared]
        lines.append(f"Arms have different numbers of runs: {', '.join(parts)}.")
    return lines


def method(analysis: Analysis) -> tuple[str, ...]:
    """Return how the numbers were computed, in sentences."""
    lines = [
        "Time is the training clock, without evaluation. All runs of an arm are put on one clock of nominal seconds, "
        "on straight lines between their evaluations. A mean needs more than half of an arm’s runs. A run that failed "
        "counts up to its last evaluation. Runs whose ends differ by less than a pause between evaluations count up to "
        "the earliest of these ends. Every interval is Student’s 95 % interval over runs, or 1.96 standard errors of "
        f"the evaluations if that is wider. Fewer than {FEWEST} runs have none.",
    ]
    if any(arm.config.get("clock") == "cpu" for arm in analysis.arms):
        lines.append("Time is processor time of the training process, without that of its reward processes.")
    if analysis.pairs:
        lines += [
            "Arms are compared at the last time at which both have scores. The interval of a difference is over the "
            "differences of equal seeds. Where the arms have different seeds, it is Welch’s. A difference is settled "
            "if the interval excludes 0, and if it also does by Holm’s method among all differences of this report.",
            "A speedup is the time at which the other arm’s mean curve first is within 1 % of the baseline’s peak, "
            "over the time at which this arm’s does, each on a straight line between two evaluations. Its interval "
            "ends where this arm’s score first may be, and first is, at that level by the same interval of the "
            "difference. It begins at 0 if the arm may never reach the level. A speedup is settled if the interval "
            "excludes 1 and a difference of the two arms is settled.",
        ]
    return tuple(lines)
