"""The words of a report: one number with its interval, headlines, what limits the numbers, and their method."""

from __future__ import annotations

import math
from collections import Counter

from ..text import counted
from .analysis import Analysis, ArmResult, Pair
from .arms import Arm, damaged_files
from .comparable import refusal, remarks
from .statistics import FLAT, SHORT, Speedup
from .text import duration, interval, number, plain, tally, unit_for, with_interval, words

_NAMED = 6  # pairs or arms that get a line of their own


# ----------------------------------------------------------------------------- one number, in cells and sentences


def final_text(result: ArmResult) -> str:
    """Return the final score with its interval over runs, or of a single run with the error of its evaluation."""
    final = result.final
    if final is None:
        return "–"
    score = number(final.final)
    if not math.isnan(result.margin):
        return f"{score} ± {number(result.margin)}"
    return with_interval(score, final.low, final.high, 3)


def speedup_text(speedup: Speedup | None) -> str:
    """Return a speedup with its interval; of an arm that does not reach the level only what the interval allows."""
    if speedup is None:
        return "–"
    if not speedup.never_reached:
        return with_interval(number(speedup.speedup, 2), speedup.ci_low, speedup.ci_high)
    if speedup.ci_high > 0:
        return f"never {interval(0.0, speedup.ci_high)}"
    return "never"


def time_to_level_text(speedup: Speedup | None, unit: str) -> str:
    """Return when an arm reached the level. An arm that ended too early to know had not at its end."""
    if speedup is None:
        return "–"
    if speedup.problem == SHORT:
        return f"> {duration(speedup.arm_end, unit)}"
    if speedup.problem:
        return "–"
    return duration(speedup.arm_time, unit)


def settled_text(pair: Pair) -> str:
    """Return which of the two comparisons of a pair are settled."""
    settled = []
    if pair.difference.settled:
        settled.append("score")
    if pair.speedup.settled:
        settled.append("speedup")
    text = " and ".join(settled) or "neither"
    if pair.difference.order:
        text += f", but every run is {pair.difference.order}"
    return text


def pairing_text(pair: Pair) -> str:
    """Return the kind of the interval of a difference."""
    if math.isnan(pair.difference.low):
        return "–"
    return "paired by seed" if pair.difference.paired else "unpaired"


def runs_text(arm: Arm) -> str:
    """Return the number of runs, and how many of them did not finish."""
    if arm.unfinished:
        return f"{arm.run_count} ({arm.unfinished})"
    return str(arm.run_count)


# ------------------------------------------------------------------------------------------------- headlines


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Return a line for each of the first pairs of arms, then the speedup of the one that the experiment is about.

    Without a pair, return the first and last score of each arm.
    """
    pairs = analysis.pairs
    if pairs:
        return (*(_scores(analysis, pair) for pair in pairs[:_NAMED]), _speedup(pairs[0]))
    scored = sorted(analysis.scored, key=_final_score, reverse=True)
    if scored:
        return tuple(_progress(analysis, result) for result in scored[:_NAMED])
    return (f"No evaluation of {plain(analysis.metric)} yet.",)


def _final_score(result: ArmResult) -> float:
    assert result.final is not None
    return result.final.final


def _progress(analysis: Analysis, result: ArmResult) -> str:
    """Return the first and last score of an arm."""
    arm = result.arm
    final = result.final
    assert final is not None
    metric = words(analysis.metric)
    runs = counted(arm.run_count, "run")
    if arm.unfinished:
        runs += f" ({arm.unfinished})"
    if not arm.is_trained:
        return f"{arm.label} starts at {number(final.start)} {metric}, {runs}."
    scores = f"from {number(final.start)} to {final_text(result)} {metric}"
    return f"{arm.label} went {scores} in {duration(final.final_seconds)}, {runs}."


def _scores(analysis: Analysis, pair: Pair) -> str:
    """Return which arm is higher and by how much, and in a second sentence whether that is settled."""
    arm = pair.arm.label
    rival = pair.rival.label
    gap = pair.difference
    side = "above" if gap.mean >= 0 else "below"
    place = f"{abs(gap.mean):.3f} {side}"
    if round(gap.mean, 3) == 0:
        place = "level with"
    verb = "is" if pair.is_early else "ends"
    scores = f"{words(analysis.metric)} {number(pair.score)} against {number(pair.rival_score)}"
    line = f"{_when(pair)}{arm} {verb} {place} {rival}: {scores}."
    runs = _runs_of(pair)
    if math.isnan(gap.low):
        return f"{line} Not settled: {runs}."
    verdict = "Settled" if gap.settled else "Not settled"
    if gap.order:
        runs += f", but every run of {arm} is {gap.order} every run of {rival}"
    return f"{line} {verdict}: 95 % interval {interval(gap.low, gap.high, 3)}, {runs}."


def _when(pair: Pair) -> str:
    """Return the time of a comparison before the end of an arm, and which arm ends there; empty at the end of both."""
    if not pair.is_early:
        return ""
    unit = unit_for(max(pair.arm.end, pair.rival.end))
    when = f"At {duration(pair.due, unit)}"
    for arm in (pair.arm, pair.rival):
        if arm.end <= pair.due * (1 + 1e-9):
            return f"{when}, where {arm.label} ends, "
    return f"{when}, "


def _runs_of(pair: Pair) -> str:
    """Return how many runs a comparison is over, and how many of the arms' runs did not finish."""
    if pair.runs == pair.rival_runs:
        text = f"{counted(pair.runs, 'run')} each"
    else:
        text = f"{pair.runs} and {counted(pair.rival_runs, 'run')}"
    unfinished = [f"{arm.label}: {arm.unfinished}" for arm in (pair.arm, pair.rival) if arm.unfinished]
    if unfinished:
        text += f" ({'; '.join(unfinished)})"
    return text


def _speedup(pair: Pair) -> str:
    """Return how much sooner an arm reached its rival's level."""
    speedup = pair.speedup
    arm = pair.arm.label
    rival = pair.rival.label
    level = number(speedup.threshold)
    if speedup.problem == FLAT:
        return f"No speedup: {rival} has 99 % of its own peak ({level}) at its first evaluation already."
    goal = f"99 % of {rival}’s peak ({level})"
    unit = unit_for(speedup.baseline_time)
    rival_time = duration(speedup.baseline_time, unit)
    if speedup.problem == SHORT:
        ends = duration(speedup.arm_end, unit)
        return f"No speedup: {arm} ends at {ends}, below {goal}, which {rival} reaches after {rival_time}."
    if speedup.never_reached:
        line = f"{arm} never reached {goal}."
        if speedup.ci_high > 0:
            line += f" Its speedup is at most {number(speedup.ci_high, 2)}x."
        return line
    if speedup.arm_time <= 0:
        return f"{arm} has {goal} at its first evaluation, {rival} after {rival_time}."
    times = f"after {duration(speedup.arm_time, unit)}, {rival} after {rival_time}"
    ratio = with_interval(f"{number(speedup.speedup, 2)}x", speedup.ci_low, speedup.ci_high)
    settled = "settled" if speedup.settled else "not settled"
    return f"{arm} reached {goal} {times}: a speedup of {ratio}, {settled}."


# ----------------------------------------------------------------------------------------------------- notes


def notes(analysis: Analysis) -> tuple[str, ...]:
    """Return the limitations of the numbers, each a sentence or two; empty if there are none."""
    lines = _unfinished_notes(analysis)
    single = [arm.label for arm in analysis.arms if arm.is_single]
    if single:
        lines.append(f"One run does not show how seeds differ. Its ± and band are over prompts: {', '.join(single)}.")
    lines += _baseline_notes(analysis)
    for result in analysis.results:
        lines += [f"{result.arm.label}: {line}" for line in _curve_notes(analysis, result)]
    damage = damaged_files(analysis.arms)
    if damage:
        lines.append(f"Skipped unreadable data: {damage}.")
    lines += remarks(analysis.compared)
    return tuple(lines)


def _unfinished_notes(analysis: Analysis) -> list[str]:
    """Return how many runs did not finish, by state."""
    states: Counter[str] = Counter()
    for arm in analysis.arms:
        states.update(run.state for run in arm.runs)
    run_count = states.total()
    del states["finished"]
    if not states:
        return []
    unfinished = f"{states.total()} of {run_count} runs did not finish ({tally(sorted(states.items()))})."
    return [f"{unfinished} Each counts up to its last evaluation."]


def _curve_notes(analysis: Analysis, result: ArmResult) -> list[str]:
    """Return what is missing from an arm's curve."""
    arm = result.arm
    if arm.curve is None:
        return _silent_notes(analysis, arm, arm.run_count)
    run_count = len(arm.curve.runs)
    lines = _silent_notes(analysis, arm, arm.run_count - run_count)
    if not arm.is_trained:
        lines.append("no evaluation after its start.")
    if arm.curve.interpolated:
        lines.append("its runs were evaluated at different times. Scores are interpolated linearly to common times.")
    if result.final and result.final.final_runs < run_count:
        lines.append(f"its final score is the mean of {result.final.final_runs} of {run_count} runs; the others ended.")
    duplicates = [seed for seed, count in Counter(arm.seeds).items() if count > 1]
    if duplicates and arm.runs:
        lines.append(f"several of its runs have seed {plain(duplicates[0])}. They may not be independent.")
    return lines


def _silent_notes(analysis: Analysis, arm: Arm, silent: int) -> list[str]:
    """Return how many runs of an arm were never evaluated."""
    if silent == 0:
        return []
    return [f"{silent} of {arm.run_count} runs have no evaluation of {plain(analysis.metric)}."]


def _baseline_notes(analysis: Analysis) -> list[str]:
    """Return why nothing is compared, or what is odd about the level that speedups are to."""
    base = analysis.baseline
    if len(analysis.results) < 2:
        return []
    if base is None:
        return ["No baseline is set, so nothing is compared.", *_mixed(analysis)]
    base_result = analysis.result_of(base.name)
    if base_result.final is None:
        return [f"{base.label}, the baseline, has no evaluation that most of its runs share: nothing is compared."]
    lines = []
    for result in analysis.results:
        if result.refused:
            lines.append(f"{result.arm.label} is not compared with {base.label}: {result.refused}.")
    if base_result.speedup and base_result.speedup.problem == FLAT:
        lines.append(
            f"{base.label} has 99 % of its peak at its first evaluation: no speedup can be measured against it."
        )
    for pair in analysis.pairs:
        if pair.rival is base and pair.is_early:
            ends = f"{pair.arm.label} and {base.label} end at different times."
            lines.append(f"{ends} They are compared at {duration(pair.due)}.")
    counts = {arm.label: arm.run_count for arm in analysis.compared}
    if len({*counts.values()}) > 1:
        parts = ", ".join(f"{label} {count}" for label, count in counts.items())
        lines.append(f"Arms have different numbers of runs: {parts}.")
    return lines


def _mixed(analysis: Analysis) -> list[str]:
    """Return why scores next to each other cannot be compared by eye either."""
    scored = [result.arm for result in analysis.scored]
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
