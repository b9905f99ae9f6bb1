"""The words for a number with its interval, and the sentences that say what was found."""

from __future__ import annotations

import math

from ..text import counted
from .analysis import Analysis, ArmResult, Pair
from .arms import Arm
from .intervals import SCORE_DIGITS, SPEEDUP_DIGITS, Difference
from .statistics import FLAT, SHORT, Speedup
from .text import duration, interval, number, plain, unit_for, with_interval, words

_NAMED = 6  # pairs or arms that get a line of their own


# ----------------------------------------------------------------------------- one number, in cells and sentences


def score_text(score: float) -> str:
    """Return a score, or a difference of scores."""
    return number(score, SCORE_DIGITS)


def level_text(baseline: Arm) -> str:
    """Return the name of the level that speedups are to."""
    return f"99 % of {baseline.label}’s peak"


def final_text(result: ArmResult) -> str:
    """Return the final score with its interval over runs, or of a single run with the error of its evaluation."""
    final = result.final
    if final is None:
        return "–"
    score = score_text(final.final)
    if not math.isnan(result.margin):
        return f"{score} ± {score_text(result.margin)}"
    return with_interval(score, final.low, final.high, SCORE_DIGITS)


def difference_text(gap: Difference) -> str:
    """Return the difference of two scores with its interval."""
    return with_interval(score_text(gap.mean), gap.low, gap.high, SCORE_DIGITS)


def speedup_text(speedup: Speedup | None) -> str:
    """Return a speedup with its interval; of an arm that does not reach the level only what the interval allows."""
    if speedup is None:
        return "–"
    if not speedup.never_reached:
        return _ratio_text(speedup)
    if speedup.ci_high > 0:
        return f"never {interval(0.0, speedup.ci_high, SPEEDUP_DIGITS)}"
    return "never"


def _ratio_text(speedup: Speedup, unit: str = "") -> str:
    """Return a speedup, followed by ``unit``, and its interval."""
    ratio = number(speedup.speedup, SPEEDUP_DIGITS) + unit
    return with_interval(ratio, speedup.ci_low, speedup.ci_high, SPEEDUP_DIGITS)


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
    if pair.difference.paired:
        return "paired by seed"
    return "unpaired"


def runs_text(arm: Arm, noun: str = "") -> str:
    """Return the number of runs, with the noun if one is given, and how many of them did not finish."""
    text = str(arm.run_count)
    if noun:
        text = counted(arm.run_count, noun)
    if arm.unfinished:
        text += f" ({arm.unfinished})"
    return text


# ------------------------------------------------------------------------------------------------- headlines


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """Return a line for each of the first pairs of arms, then the speedup of the one that the experiment is about.

    Without a pair, return the first and last score of each arm.
    """
    pairs = analysis.pairs
    lines = []
    if pairs:
        for pair in pairs[:_NAMED]:
            lines.append(_scores_sentence(analysis, pair))
        lines.append(_speedup_sentence(pairs[0]))
        return tuple(lines)
    scored = sorted(analysis.scored, key=_final_score, reverse=True)
    for result in scored[:_NAMED]:
        lines.append(_progress_sentence(analysis, result))
    if not lines:
        lines.append(f"No evaluation of {plain(analysis.metric)} yet.")
    return tuple(lines)


def _final_score(result: ArmResult) -> float:
    assert result.final is not None
    return result.final.final


def _progress_sentence(analysis: Analysis, result: ArmResult) -> str:
    """Return the first and last score of an arm."""
    arm = result.arm
    final = result.final
    assert final is not None
    metric = words(analysis.metric)
    runs = runs_text(arm, "run")
    start = score_text(final.start)
    if not arm.is_trained:
        return f"{arm.label} starts at {start} {metric}, {runs}."
    scores = f"from {start} to {final_text(result)} {metric}"
    return f"{arm.label} went {scores} in {duration(final.final_seconds)}, {runs}."


def _scores_sentence(analysis: Analysis, pair: Pair) -> str:
    """Return which arm is higher and by how much, and in a second sentence whether that is settled."""
    arm = pair.arm.label
    rival = pair.rival.label
    gap = pair.difference
    verb = "ends"
    if pair.is_early:
        verb = "is"
    scores = f"{words(analysis.metric)} {score_text(pair.score)} against {score_text(pair.rival_score)}"
    line = f"{_when(pair)}{arm} {verb} {_place(gap)} {rival}: {scores}."
    verdict = _verdict(gap.settled).capitalize()
    runs = _runs_of(pair)
    if math.isnan(gap.low):
        return f"{line} {verdict}: {runs}."
    if gap.order:
        runs += f", but every run of {arm} is {gap.order} every run of {rival}"
    return f"{line} {verdict}: 95 % interval {interval(gap.low, gap.high, SCORE_DIGITS)}, {runs}."


def _place(gap: Difference) -> str:
    """Return how much higher or lower the first arm is."""
    if round(gap.mean, SCORE_DIGITS) == 0:
        return "level with"
    distance = score_text(abs(gap.mean))
    if gap.mean > 0:
        return f"{distance} above"
    return f"{distance} below"


def _verdict(is_settled: bool) -> str:
    if is_settled:
        return "settled"
    return "not settled"


def _when(pair: Pair) -> str:
    """Return the time of a comparison before the end of an arm, and which arm ends there; empty at the end of both."""
    if not pair.is_early:
        return ""
    unit = unit_for(max(pair.arm.end, pair.rival.end))
    when = f"At {duration(pair.due, unit)}"
    if pair.ended:
        when += f", where {pair.ended.label} ends"
    return f"{when}, "


def _runs_of(pair: Pair) -> str:
    """Return how many runs a comparison is over, and how many of the arms' runs did not finish."""
    if pair.runs == pair.rival_runs:
        text = f"{counted(pair.runs, 'run')} each"
    else:
        text = f"{pair.runs} and {counted(pair.rival_runs, 'run')}"
    unfinished = []
    for arm in (pair.arm, pair.rival):
        if arm.unfinished:
            unfinished.append(f"{arm.label}: {arm.unfinished}")
    if unfinished:
        text += f" ({'; '.join(unfinished)})"
    return text


def _speedup_sentence(pair: Pair) -> str:
    """Return how much sooner an arm reached its rival's level."""
    speedup = pair.speedup
    arm = pair.arm.label
    rival = pair.rival.label
    level = score_text(speedup.threshold)
    if speedup.problem == FLAT:
        return f"No speedup: {rival} has 99 % of its own peak ({level}) at its first evaluation already."
    goal = f"{level_text(pair.rival)} ({level})"
    unit = unit_for(speedup.baseline_time)
    rival_time = duration(speedup.baseline_time, unit)
    if speedup.problem == SHORT:
        ends = duration(speedup.arm_end, unit)
        return f"No speedup: {arm} ends at {ends}, below {goal}, which {rival} reaches after {rival_time}."
    if speedup.never_reached:
        line = f"{arm} never reached {goal}."
        if speedup.ci_high > 0:
            line += f" Its speedup is at most {number(speedup.ci_high, SPEEDUP_DIGITS)}x."
        return line
    if speedup.arm_time <= 0:
        return f"{arm} has {goal} at its first evaluation, {rival} after {rival_time}."
    times = f"after {duration(speedup.arm_time, unit)}, {rival} after {rival_time}"
    ratio = _ratio_text(speedup, "x")
    return f"{arm} reached {goal} {times}: a speedup of {ratio}, {_verdict(speedup.settled)}."
