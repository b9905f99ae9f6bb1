"""The words for a number with its interval, and the sentences that say what was found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..text import counted
from .analysis import Analysis, ArmResult, Cost, Pair
from .arms import LENGTH, Arm
from .intervals import SCORE_DIGITS, SPEEDUP_DIGITS, Difference
from .statistics import FLAT, SHORT, Speedup
from .text import duration, interval, number, percent, signed, two_digits, unit_for, with_interval, words

LEVEL_MARGIN = 0.02
"""Two arms are level if the interval of their difference lies within this distance of 0: two points of accuracy."""

_NAMED = 6  # arms that get a line of their own
_NEITHER_BETTER = (LENGTH, "truncated_share", "eval_seconds")  # metrics that are not scores


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
        ratio = number(speedup.speedup, SPEEDUP_DIGITS)
        return with_interval(ratio, speedup.ci_low, speedup.ci_high, SPEEDUP_DIGITS)
    if speedup.ci_high > 0:
        return f"never {interval(0.0, speedup.ci_high, SPEEDUP_DIGITS)}"
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


# ------------------------------------------------------------------------------------ the table of the result


def result_text(analysis: Analysis, result: ArmResult) -> str:
    """Return the final score with its interval, a share of right answers in percent: for the table of the result."""
    final = result.final
    if final is None or not analysis.is_share:
        return final_text(result)
    score = percent(final.final)
    if not math.isnan(result.margin):
        return f"{score} ± {number(100 * result.margin, 1)}"
    return with_interval(score, 100 * final.low, 100 * final.high, 1)


def _target(analysis: Analysis, level: float) -> str:
    """Return the score that times and speedups are to, such as ``78.8 % accuracy``."""
    if analysis.is_share:
        return f"{short_target_text(analysis, level)} {words(analysis.metric)}"
    return f"{words(analysis.metric)} {short_target_text(analysis, level)}"


def short_target_text(analysis: Analysis, level: float) -> str:
    """Return the score that times are to, without the name of the metric."""
    if analysis.is_share:
        return percent(level).replace(".0 %", " %")
    return score_text(level)


def step_text(cost: Cost | None) -> str:
    """Return the seconds of a step with two digits."""
    if cost is None or not math.isfinite(cost.seconds_per_step):
        return "–"
    return f"{two_digits(cost.seconds_per_step)} s"


def verdict_text(analysis: Analysis, result: ArmResult) -> str:
    """Return in a word how the final score of an arm compares with that of the baseline."""
    if result.arm is analysis.baseline:
        return "baseline"
    if result.refused:
        return "not compared"
    pair = analysis.pair_with_baseline(result.arm)
    if pair is None:
        return "–"
    gap = pair.difference
    if math.isnan(gap.low):
        return "one run"
    higher = "better"
    lower = "worse"
    if analysis.metric in _NEITHER_BETTER:
        higher = "higher"
        lower = "lower"
    if gap.settled and gap.mean > 0:
        return higher
    if gap.settled:
        return lower
    if analysis.is_share and max(-gap.low, gap.high) <= LEVEL_MARGIN:
        return "level"
    return "not settled"


# ------------------------------------------------------------------------------------------------- sentences


def opening(analysis: Analysis) -> tuple[str, ...]:
    """Return the sentences that open a report: the difference of the final scores, then the cost of a step.

    They are about the subject of the experiment and the baseline. Without a pair of arms, they give the first and last
    score of each arm.
    """
    lines = []
    if analysis.pairs:
        pair = analysis.pairs[0]
        lines.append(_difference_sentence(analysis, pair))
        lines += _cost_sentences([analysis.result_of(pair.arm.name), analysis.result_of(pair.rival.name)])
        return tuple(lines)
    scored = sorted(analysis.scored, key=_final_score, reverse=True)
    for result in scored[:_NAMED]:
        lines.append(_progress_sentence(analysis, result))
    if not lines:
        line = f"No evaluation of {words(analysis.metric)} yet"
        running = analysis.states["running"]
        if running == 1:
            line += ": 1 run trains"
        elif running:
            line += f": {running} runs train"
        lines.append(f"{line}.")
    if len(analysis.results) == 1:
        lines += _cost_sentences(analysis.results)
    return tuple(lines)


def details(analysis: Analysis) -> tuple[str, ...]:
    """Return how much faster the subject of the experiment is to the level of the baseline; empty without a pair."""
    if not analysis.pairs:
        return ()
    return (_speedup_sentence(analysis, analysis.pairs[0]),)


def _final_score(result: ArmResult) -> float:
    assert result.final is not None
    return result.final.final


def _score(analysis: Analysis, score: float) -> str:
    """Return a score without the name of the metric."""
    if analysis.is_share:
        return percent(score)
    return score_text(score)


def _named_score(analysis: Analysis, score: float) -> str:
    """Return a score with the name of the metric."""
    if analysis.is_share:
        return f"{percent(score)} {words(analysis.metric)}"
    return f"{words(analysis.metric)} {score_text(score)}"


def _progress_sentence(analysis: Analysis, result: ArmResult) -> str:
    """Return the first and last score of an arm."""
    arm = result.arm
    final = result.final
    assert final is not None
    runs = runs_text(arm, "run")
    if not arm.is_trained:
        return f"{arm.label} starts at {_named_score(analysis, final.start)}, {runs}."
    first = _score(analysis, final.start)
    last = result_text(analysis, result)
    name = words(analysis.metric)
    return f"{arm.label} went from {first} to {last} {name} in {duration(final.final_seconds)}, {runs}."


def _cost_sentences(results: Sequence[ArmResult]) -> list[str]:
    """Return one sentence with the seconds of a step of one or two arms; none if they were not logged."""
    parts: list[str] = []
    for result in results:
        if result.cost is None or not math.isfinite(result.cost.seconds_per_step):
            continue
        if parts:
            parts.append(f"of {result.arm.label} {step_text(result.cost)}")
        else:
            parts.append(f"A step of {result.arm.label} takes {step_text(result.cost)}")
    if not parts:
        return []
    return [", ".join(parts) + "."]


def _difference_sentence(analysis: Analysis, pair: Pair) -> str:
    """Return the scores of two arms at one time, their difference with its interval, and whether it is settled."""
    gap = pair.difference
    scores = f"{pair.arm.label} has {_named_score(analysis, pair.score)} and {pair.rival.label} "
    scores += _score(analysis, pair.rival_score)
    about = _runs_of(pair)
    if not math.isnan(gap.low):
        low = _signed(analysis, gap.low)
        high = _signed(analysis, gap.high)
        about = f"95 % interval {low} to {high}, {about}"
    return f"After {_when(pair)}, {scores}: {_distance(analysis, gap)} ({about}), {_verdict(pair)}."


def _distance(analysis: Analysis, gap: Difference) -> str:
    """Return how much higher or lower the first arm is."""
    size = round(abs(gap.mean), SCORE_DIGITS)
    if size == 0:
        return "no difference"
    text = score_text(size)
    if analysis.is_share:
        text = f"{number(100 * size, 1)} points"
    if gap.mean > 0:
        return f"{text} more"
    return f"{text} less"


def _signed(analysis: Analysis, difference: float) -> str:
    """Return an end of the interval of a difference with its sign."""
    if analysis.is_share:
        return signed(100 * difference, 1)
    return signed(difference, SCORE_DIGITS)


def _verdict(pair: Pair) -> str:
    """Return whether a difference is settled, in words that say what that means."""
    gap = pair.difference
    if gap.settled:
        return "settled: this is hardly chance"
    if math.isnan(gap.low):
        return "not settled: one run does not show how much seeds differ"
    if gap.order:
        every = f"every run of {pair.arm.label} is {gap.order} every run of {pair.rival.label}"
        return f"not settled, although {every}"
    return "not settled: this may be chance"


def _when(pair: Pair) -> str:
    """Return the time of a comparison, and which arm ends there if the other has later scores."""
    unit = unit_for(max(pair.arm.end, pair.rival.end))
    when = f"{duration(pair.due, unit)} of training"
    if pair.is_early and pair.ended:
        when += f", where {pair.ended.label} ends"
    return when


def _runs_of(pair: Pair) -> str:
    """Return how many runs a comparison is over."""
    if pair.runs == pair.rival_runs:
        return f"{counted(pair.runs, 'run')} each"
    return f"{pair.runs} and {counted(pair.rival_runs, 'run')}"


def _speedup_sentence(analysis: Analysis, pair: Pair) -> str:
    """Return how many times faster an arm reached its rival's level."""
    speedup = pair.to_target
    arm = pair.arm.label
    rival = pair.rival.label
    goal = _target(analysis, speedup.threshold)
    if speedup.problem == FLAT:
        return f"No speedup: {rival} has 99 % of its own peak ({goal}) at its first evaluation already."
    unit = unit_for(speedup.baseline_time)
    rival_time = duration(speedup.baseline_time, unit)
    if speedup.problem == SHORT:
        ends = duration(speedup.arm_end, unit)
        return f"No speedup: {arm} ends at {ends}, below {goal}, which {rival} reaches after {rival_time}."
    if speedup.never_reached:
        line = f"{arm} never reached {goal}, which {rival} reaches after {rival_time}."
        if speedup.ci_high > 0:
            line += f" By the 95 % interval it is at most {number(speedup.ci_high, SPEEDUP_DIGITS)} times faster."
        return line
    if speedup.arm_time <= 0:
        return f"{arm} has {goal} at its first evaluation, {rival} after {rival_time}."
    times = f"{duration(speedup.arm_time, unit)} against {rival_time}"
    return f"{arm} is {_faster(speedup)} than {rival} to {goal}: {times}{_settled_speedup(speedup)}."


def _faster(speedup: Speedup) -> str:
    """Return a speedup in words."""
    if speedup.speedup >= 1:
        return f"{number(speedup.speedup, SPEEDUP_DIGITS)} times faster"
    return f"{number(1 / speedup.speedup, SPEEDUP_DIGITS)} times slower"


def _settled_speedup(speedup: Speedup) -> str:
    """Return the interval of a speedup, as many times faster or slower as the speedup is, and whether it is settled."""
    if math.isnan(speedup.ci_low):
        return ""
    low = speedup.ci_low
    high = speedup.ci_high
    if speedup.speedup < 1:
        low = 1 / speedup.ci_high
        high = math.inf
        if speedup.ci_low > 0:
            high = 1 / speedup.ci_low
    verdict = "not settled"
    if speedup.settled:
        verdict = "settled"
    ends = f"{number(low, SPEEDUP_DIGITS)} to {number(high, SPEEDUP_DIGITS)}"
    return f" (95 % interval {ends} times, {verdict})"
