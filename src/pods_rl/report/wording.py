"""The words for a number with its interval, and what a report found: a number and a text each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..text import counted
from .analysis import Analysis, ArmPair, ArmResult, Cost, Final
from .arms import LENGTH, Arm
from .comparable import why_incomparable
from .intervals import FEWEST, SCORE_DIGITS, SPEEDUP_DIGITS, Difference
from .statistics import Speedup
from .text import duration, interval, number_text, signed, unit_for, with_interval, words

LEVEL_MARGIN = 0.02
"""Two arms are level if the interval of their difference lies within this distance of 0: two points of accuracy."""

_MOST_NAMED = 6  # settled pairs that get a sentence; the table has all
_NEITHER_BETTER = (LENGTH, "truncated_share", "eval_seconds")  # metrics that are not scores


class Finding(NamedTuple):
    """What a report says of a comparison or of an arm."""

    number: str  # of a settled pair, such as "+14.1 points"; else empty
    text: str

    @property
    def sentence(self) -> str:
        """All of it on one line, as outputs without a layout show it."""
        return f"{self.number} {self.text}".lstrip()


# ----------------------------------------------------------------------------- one number, in cells and sentences


def score_text(analysis: Analysis, metric: str, score: float) -> str:
    """Return a score, a share of right answers in percent. Every output has the same unit."""
    if analysis.is_share_of(metric) and not math.isnan(score):
        return f"{number_text(100 * score, 1)} %"
    return number_text(score, 1 if metric == LENGTH else SCORE_DIGITS)


def gap_text(analysis: Analysis, difference: float) -> str:
    """Return a difference of scores with its sign, of shares of right answers in points."""
    return f"{signed(100 * difference, 1)} points" if analysis.is_share else signed(difference, SCORE_DIGITS)


def difference_text(analysis: Analysis, gap: Difference) -> str:
    """Return the difference of two scores with its interval, of shares of right answers in points."""
    scale, digits = (100, 1) if analysis.is_share else (1, SCORE_DIGITS)
    return with_interval(gap_text(analysis, gap.mean), scale * gap.low, scale * gap.high, digits)


def speedup_text(speedup: Speedup | None, arm: Arm) -> str:
    """Return a speedup with its interval; of an arm that does not reach the target only what the interval allows."""
    if speedup is None:
        return "–"
    if not speedup.never_reached:
        ratio = number_text(speedup.speedup, SPEEDUP_DIGITS)
        return with_interval(ratio, speedup.ci_low, speedup.ci_high, SPEEDUP_DIGITS)
    if speedup.ci_high > 0:
        return f"{_never(arm)} {interval(0.0, speedup.ci_high, SPEEDUP_DIGITS)}"
    return _never(arm)


def _never(arm: Arm) -> str:
    return "not yet" if arm.is_running else "never"


def time_to_target_text(result: ArmResult, unit: str) -> str:
    """Return when an arm reached the target."""
    return _never(result.arm) if math.isinf(result.time_to_target) else duration(result.time_to_target, unit)


def settled_text(pair: ArmPair) -> str:
    """Return which of the comparisons of a pair are settled."""
    settled = []
    if pair.difference.settled:
        settled.append("at the end")
    if pair.over_time.settled:
        settled.append("over time")
    if pair.speedup_settled:
        settled.append("speedup")
    return ", ".join(settled) or "nothing"


def runs_text(arm: Arm, noun: str = "") -> str:
    """Return the number of runs, with the noun if one is given, and how many of them did not finish."""
    text = counted(arm.run_count, noun) if noun else str(arm.run_count)
    return f"{text} ({arm.unfinished})" if arm.unfinished else text


def result_text(analysis: Analysis, final: Final | None) -> str:
    """Return the final score with its interval over runs."""
    if final is None:
        return "–"
    score = score_text(analysis, analysis.metric, final.final)
    if analysis.is_share:  # no share is below 0 or above 1
        low, high = (min(max(100 * edge, 0.0), 100.0) for edge in (final.final_low, final.final_high))
        return with_interval(score, low, high, 1)
    return with_interval(score, final.final_low, final.final_high, SCORE_DIGITS)


def target_text(analysis: Analysis) -> str:
    """Return the score that times and speedups are to."""
    target = analysis.target if analysis.target is not None else math.nan
    return score_text(analysis, analysis.metric, target).replace(".0 %", " %")


def step_text(cost: Cost | None) -> str:
    """Return the seconds of a step."""
    if cost is None or not math.isfinite(cost.seconds_per_step):
        return "–"
    return f"{number_text(cost.seconds_per_step, 2)} s"


def verdict_text(analysis: Analysis, arm: Arm) -> str:
    """Return in a word how the final score of an arm compares with that of the baseline."""
    if arm is analysis.baseline:
        return "baseline"
    for pair in analysis.pairs:
        if pair.arm is arm and pair.rival is analysis.baseline:
            return _verdict(analysis, pair.difference)
        if pair.rival is arm and pair.arm is analysis.baseline:
            return _verdict(analysis, -pair.difference)
    refused = any(arm in (one, other) for one, other, _ in analysis.refused)
    return "not compared" if refused else "–"


def _verdict(analysis: Analysis, gap: Difference) -> str:
    if math.isnan(gap.low):
        return "few runs"
    if gap.settled:
        higher, lower = ("higher", "lower") if analysis.metric in _NEITHER_BETTER else ("better", "worse")
        return higher if gap.mean > 0 else lower
    return "level" if is_level(analysis, gap) else "not settled"


def is_level(analysis: Analysis, gap: Difference) -> bool:
    """Whether two arms have the same score within the margin."""
    # The margin is in points of accuracy: other metrics have other units.
    return analysis.is_share and not gap.settled and max(-gap.low, gap.high) <= LEVEL_MARGIN


# ------------------------------------------------------------------------------------------------- findings


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """Return what a report says first: the settled comparisons, the largest difference before the others."""
    if not analysis.pairs:
        return _without_pairs(analysis)
    settled = sorted((pair for pair in analysis.pairs if pair.settled), key=lambda pair: -abs(pair.main.mean))
    found = [_of_pair(analysis, pair) for pair in settled[:_MOST_NAMED]]
    if len(settled) > _MOST_NAMED:
        found.append(Finding("", f"Also settled: {_names(settled[_MOST_NAMED:])}."))
    level = [pair for pair in analysis.pairs if not pair.settled and is_level(analysis, pair.difference)]
    unsettled = [pair for pair in analysis.pairs if not pair.settled and pair not in level]
    if level:
        found.append(Finding("", f"Level within {100 * LEVEL_MARGIN:g} points: {_names(level)}."))
    if not settled:
        found.insert(0, _nothing_settled(analysis))
    elif unsettled:
        found.append(Finding("", f"Not settled: {_names(unsettled)}."))
    return tuple(found)


def _names(pairs: Sequence[ArmPair]) -> str:
    """Return pairs by their arms and what they show."""
    names = []
    for pair in pairs:
        shown = f" ({pair.shows})" if pair.shows else ""
        names.append(f"{pair.arm.label} against {pair.rival.label}{shown}")
    return "; ".join(names)


def _of_pair(analysis: Analysis, pair: ArmPair) -> Finding:
    """Return what a settled pair shows: its difference at the end, else over the run, and how much faster it is."""
    cause = f"from {pair.shows}" if pair.shows else f"for {pair.arm.label} against {pair.rival.label}"
    if not pair.difference.settled:
        cause += ", in the mean over the run"
    when = f"{duration(pair.due, unit_for(max(pair.arm.end, pair.rival.end)))} of training"
    if pair.is_running:
        when += " so far"
    elif pair.is_early:  # one of the arms ends there, and the other has later scores
        when += f", where {min(pair.arm, pair.rival, key=lambda arm: arm.end).label} ends"
    scores = (
        f"{pair.arm.label} has {_named_score(analysis, pair.score)} after {when}, and {pair.rival.label} has "
        f"{score_text(analysis, analysis.metric, pair.rival_score)}"
    )
    if pair.runs == pair.rival_runs:
        runs = f"{counted(pair.runs, 'run')} each"
    else:
        runs = f"{pair.runs} and {counted(pair.rival_runs, 'run')}"
    scale, digits = (100, 1) if analysis.is_share else (1, SCORE_DIGITS)
    edges = f"{signed(scale * pair.main.low, digits)} to {signed(scale * pair.main.high, digits)}"
    text = f"{cause} (95 % interval {edges}, {runs}): {scores}{_speedup_clause(analysis, pair)}."
    return Finding(gap_text(analysis, pair.main.mean), text)


def _speedup_clause(analysis: Analysis, pair: ArmPair) -> str:
    """Return how much faster an arm reaches the target than its rival; empty if that is not settled."""
    speedup = pair.speedup
    if speedup is None or not pair.speedup_settled:
        return ""
    target = target_text(analysis)
    if speedup.never_reached:
        never = "has not reached" if pair.arm.is_running else "never reaches"
        return f"; {pair.arm.label} {never} {target}"
    if not math.isfinite(speedup.speedup):
        return f"; {pair.rival.label} does not reach {target}"
    low = number_text(speedup.ci_low, SPEEDUP_DIGITS)
    high = number_text(speedup.ci_high, SPEEDUP_DIGITS)
    return f"; {number_text(speedup.speedup, SPEEDUP_DIGITS)} times as fast ({low} to {high}) to {target}"


def _nothing_settled(analysis: Analysis) -> Finding:
    """Return that nothing is settled, and the highest score next to the baseline's."""
    best, final = _highest(analysis)
    counts = sorted({arm.run_count for arm in analysis.compared})
    seeds = counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    text = f"Nothing is settled with {seeds}; highest: {best.label} with {_named_score(analysis, final.final)}"
    text += f" after {duration(final.final_due)}"
    base = analysis.baseline
    base_final = analysis.result_of(base.name).final if base else None
    if base is best:
        text += ", the baseline"
    elif base and base_final:
        score = score_text(analysis, analysis.metric, base_final.final)
        text += f"; the baseline {base.label} has {score}"
    if counts[0] < FEWEST:
        text += f". Intervals need {FEWEST} seeds or more"
    return Finding("", f"{text}.")


def _without_pairs(analysis: Analysis) -> tuple[Finding, ...]:
    """Return the first and last score of the highest arm, or that there is none yet."""
    if not analysis.scored:
        running = analysis.states["running"]
        trains = f": {counted(running, 'run')} {'trains' if running == 1 else 'train'}" if running else ""
        return (Finding("", f"No evaluation of {words(analysis.metric)} yet{trains}."),)
    best, final = _highest(analysis)
    runs = runs_text(best, "run")
    if not best.is_trained:
        return (Finding("", f"{best.label} starts at {_named_score(analysis, final.start)}, {runs}."),)
    first = score_text(analysis, analysis.metric, final.start)
    last = result_text(analysis, final)
    name = words(analysis.metric)
    time = duration(final.final_seconds)
    # scores on other questions are neither higher nor lower
    is_alike = not any(why_incomparable(best.runs, result.arm.runs) for result in analysis.scored)
    highest = "Highest: " if is_alike and len(analysis.scored) > 1 else ""
    return (Finding("", f"{highest}{best.label} went from {first} to {last} {name} in {time}, {runs}."),)


def _highest(analysis: Analysis) -> tuple[Arm, Final]:
    """Return the arm with the highest final score among those that are compared, and its scores."""
    compared = analysis.compared
    finals = [(result.arm, result.final) for result in analysis.scored if result.final and result.arm in compared]
    return max(finals, key=lambda arm_and_final: arm_and_final[1].final)


def _named_score(analysis: Analysis, score: float) -> str:
    """Return a score with the name of the metric."""
    text = score_text(analysis, analysis.metric, score)
    return f"{text} {words(analysis.metric)}" if analysis.is_share else f"{words(analysis.metric)} {text}"
