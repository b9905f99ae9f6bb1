"""The words for a number with its interval, and the sentences that say what was found."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..text import counted
from .analysis import Analysis, ArmResult, Cost, Pair
from .arms import LENGTH, Arm
from .intervals import SCORE_DIGITS, SPEEDUP_DIGITS, Difference
from .statistics import FLAT, SHORT, Speedup
from .text import duration, interval, number, percent, signed, two_digits, unit_for, with_interval, words

LEVEL_MARGIN = 0.02
"""Two arms are level if the interval of their difference lies within this distance of 0: two points of accuracy."""

_UNSETTLED = "Cannot tell yet"
_LEVEL = f"Level within {100 * LEVEL_MARGIN:g} points"
_LEADING_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?( points)?(?= from |: )")

_NAMED = 6  # arms that get a line of their own
_NEITHER_BETTER = (LENGTH, "truncated_share", "eval_seconds")  # metrics that are not scores


# ----------------------------------------------------------------------------- one number, in cells and sentences


def score_text(analysis: Analysis, metric: str, score: float) -> str:
    """Return a score, a share of right answers in percent. Every output has the same unit."""
    if analysis.is_share_of(metric) and not math.isnan(score):
        return percent(score)
    return number(score, 1 if metric == LENGTH else SCORE_DIGITS)


def level_text(baseline: Arm) -> str:
    """Return the name of the level that speedups are to."""
    return f"99 % of {baseline.label}’s peak"


def difference_text(analysis: Analysis, gap: Difference) -> str:
    """Return the difference of two scores with its interval, of shares of right answers in points."""
    if analysis.is_share:
        return with_interval(f"{signed(100 * gap.mean, 1)} points", 100 * gap.low, 100 * gap.high, 1)
    return with_interval(number(gap.mean, SCORE_DIGITS), gap.low, gap.high, SCORE_DIGITS)


def speedup_text(speedup: Speedup | None, arm: Arm) -> str:
    """Return a speedup with its interval; of an arm that does not reach the level only what the interval allows."""
    if speedup is None:
        return "–"
    if not speedup.never_reached:
        ratio = number(speedup.speedup, SPEEDUP_DIGITS)
        return with_interval(ratio, speedup.ci_low, speedup.ci_high, SPEEDUP_DIGITS)
    if speedup.ci_high > 0:
        return f"{_never(arm)} {interval(0.0, speedup.ci_high, SPEEDUP_DIGITS)}"
    return _never(arm)


def _never(arm: Arm) -> str:
    return "not yet" if arm.is_running else "never"


def time_to_level_text(speedup: Speedup | None, arm: Arm, unit: str) -> str:
    """Return when an arm reached the level. An arm that ended too early to know had not at its end."""
    if speedup is None:
        return "–"
    if speedup.problem == SHORT:
        return f"> {duration(speedup.arm_end, unit)}"
    if speedup.problem:
        return "–"
    if speedup.never_reached:
        return _never(arm)
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
    text = counted(arm.run_count, noun) if noun else str(arm.run_count)
    if arm.unfinished:
        text += f" ({arm.unfinished})"
    return text


# ------------------------------------------------------------------------------------ the table of the result


def result_text(analysis: Analysis, result: ArmResult) -> str:
    """Return the final score with its interval over runs, or of a single run with the error of its evaluation."""
    final = result.final
    if final is None:
        return "–"
    scale = 1.0
    digits = SCORE_DIGITS
    if analysis.is_share:
        scale = 100.0
        digits = 1
    score = _score(analysis, final.final)
    if not math.isnan(result.margin):
        return f"{score} ± {number(scale * result.margin, digits)}"
    low = scale * final.low
    high = scale * final.high
    if analysis.is_share and not math.isnan(low):  # no share is below 0 or above 1
        low = max(low, 0.0)
        high = min(high, scale)
    return with_interval(score, low, high, digits)


def _target(analysis: Analysis, level: float) -> str:
    """Return the score that times and speedups are to, such as ``78.8 % accuracy``."""
    if analysis.is_share:
        return f"{short_target_text(analysis, level)} {words(analysis.metric)}"
    return f"{words(analysis.metric)} {short_target_text(analysis, level)}"


def short_target_text(analysis: Analysis, level: float) -> str:
    """Return the score that times are to, without the name of the metric."""
    if analysis.is_share:
        return percent(level).replace(".0 %", " %")
    return number(level, SCORE_DIGITS)


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
    if is_level(analysis, gap):
        return "level"
    return "not settled"


# ------------------------------------------------------------------------------------------------- sentences


def opening(analysis: Analysis) -> tuple[str, ...]:
    """Return the sentences that open a report, each of a pair of arms that shows one thing, with its verdict.

    If no pair does, the sentence is about the subject of the experiment and the baseline, and says in what they differ.
    Without a pair of arms, the sentences give the first and last score of each arm.
    """
    lines = []
    if analysis.pairs:
        stated = analysis.stated or analysis.pairs[:1]
        lines += [_pair_sentence(analysis, pair) for pair in stated[:_NAMED]]
        if len(stated) > _NAMED:
            lines.append(f"{len(stated) - _NAMED} more pairs differ in one thing: the table of pairs has them.")
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
    """Return what follows the sentences that open a report; empty without a pair.

    It is the subject against the baseline if they differ in more than one thing, how much faster each arm is, and the
    cost of a step.
    """
    if not analysis.pairs:
        return ()
    lines = []
    pairs = [*analysis.stated[:_NAMED]]
    about = analysis.pairs[0]
    if about not in analysis.stated:
        if analysis.stated:
            lines.append(_pair_sentence(analysis, about))
        pairs.append(about)
    lines += [_speedup_sentence(analysis, pair) for pair in pairs]
    costs: dict[str, ArmResult] = {}
    for pair in pairs:
        for arm in (pair.arm, pair.rival):
            costs[arm.name] = analysis.result_of(arm.name)
    lines += _cost_sentences([*costs.values()])
    return tuple(lines)


def number_of(sentence: str) -> str:
    """Return the number, or the verdict, with which a sentence of a pair begins; empty of another sentence.

    >>> number_of("+14.1 points from selection: pods has ..."), number_of("pods went from 16.8 % to 28.1 %.")
    ('+14.1 points', '')
    """
    for beginning in (_UNSETTLED, _LEVEL):
        if sentence.startswith(beginning):
            return beginning
    match = _LEADING_NUMBER.match(sentence)
    if match:
        return match.group()
    return ""


def _final_score(result: ArmResult) -> float:
    assert result.final is not None
    return result.final.final


def _score(analysis: Analysis, score: float) -> str:
    """Return a score without the name of the metric."""
    if analysis.is_share:
        return percent(score)
    return number(score, SCORE_DIGITS)


def _named_score(analysis: Analysis, score: float) -> str:
    """Return a score with the name of the metric."""
    if analysis.is_share:
        return f"{percent(score)} {words(analysis.metric)}"
    return f"{words(analysis.metric)} {number(score, SCORE_DIGITS)}"


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


def _pair_sentence(analysis: Analysis, pair: Pair) -> str:
    """Return what a pair shows: the difference, the scores of the two arms at one time, and whether it is settled.

    What is not settled is not asserted: the sentence begins with that. The difference over the run follows.
    """
    return f"{_end_sentence(analysis, pair)}{_also(pair)}{_over_time(analysis, pair)}"


def _end_sentence(analysis: Analysis, pair: Pair) -> str:
    gap = pair.difference
    arm = pair.arm.label
    rival = pair.rival.label
    scores = f"{arm} has {_named_score(analysis, pair.score)} and {rival} {_score(analysis, pair.rival_score)}"
    scores += f" after {_when(pair)}"
    about = _runs_of(pair)
    if not math.isnan(gap.low):
        about = f"95 % interval {_signed(analysis, gap.low)} to {_signed(analysis, gap.high)}, {about}"
    cause = _cause(pair)
    size = _signed(analysis, gap.mean)
    if analysis.is_share:
        size += " points"
    if gap.settled:
        source = f" from {cause}" if cause else ""
        return f"{size}{source}: {scores} ({about}). Settled: this is hardly chance."
    if is_level(analysis, gap):
        with_cause = f" with and without {cause}" if pair.shows else ""
        return f"{_LEVEL}{with_cause}: {scores}, {size} ({about})."
    at_end = " at the end" if _over_time(analysis, pair) and not pair.is_running else ""
    question = f"what {cause} gives{at_end}" if cause else f"whether {arm} differs from {rival}{at_end}"
    why = ""
    if math.isnan(gap.low):
        why = " One run does not show how much seeds differ."
    elif gap.excludes_zero:
        why = f" Among all differences of this report it may be chance (p = {number(gap.p, 2)})."
    elif gap.order:
        why = f" Every run of {arm} is {gap.order} every run of {rival}."
    return f"{_UNSETTLED} {question}: {scores}, {size} ({about}).{why}"


def _over_time(analysis: Analysis, pair: Pair) -> str:
    """Return the difference of the mean scores over the run, with its interval; empty if it has none."""
    gap = pair.over_time
    if gap is None or math.isnan(gap.low):
        return ""
    size = _signed(analysis, gap.mean)
    if analysis.is_share:
        size += " points"
    verdict = "settled" if gap.settled else "not settled"
    return (
        f" On average over the run: {size} ({_signed(analysis, gap.low)} to {_signed(analysis, gap.high)}, {verdict})."
    )


def _cause(pair: Pair) -> str:
    """Return what a pair shows, or all that its arms differ in; empty if that is unknown or nothing."""
    if pair.shows:
        return pair.shows
    together = " together" if len(pair.differs_in or ()) > 1 else ""
    return differs_text(pair, "") + together


def differs_text(pair: Pair, otherwise: str = "–") -> str:
    """Return what two arms differ in."""
    if not pair.differs_in:
        return otherwise
    *first, last = pair.differs_in
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def _also(pair: Pair) -> str:
    """Return what else the arms of a pair differ in, if the sentence names one thing."""
    also = [thing for thing in pair.differs_in or () if thing != pair.shows]
    if not pair.shows or not also:
        return ""
    return f" The two also differ in {', '.join(also)}."


def is_level(analysis: Analysis, gap: Difference) -> bool:
    """Whether two arms have the same score within the margin."""
    return analysis.is_share and not gap.settled and max(-gap.low, gap.high) <= LEVEL_MARGIN


def _signed(analysis: Analysis, difference: float) -> str:
    """Return a difference of scores, or an end of its interval, with its sign."""
    if analysis.is_share:
        return signed(100 * difference, 1)
    return signed(difference, SCORE_DIGITS)


def _when(pair: Pair) -> str:
    """Return the time of a comparison, and which arm ends there if the other has later scores."""
    unit = unit_for(max(pair.arm.end, pair.rival.end))
    when = f"{duration(pair.due, unit)} of training"
    if pair.is_running:
        when += " so far"
    elif pair.is_early and pair.ended:
        when += f", where {pair.ended.label} ends"
    return when


def _runs_of(pair: Pair) -> str:
    """Return how many runs a comparison is over."""
    if pair.runs == pair.rival_runs:
        return f"{counted(pair.runs, 'run')} each"
    return f"{pair.runs} and {counted(pair.rival_runs, 'run')}"


def _speedup_sentence(analysis: Analysis, pair: Pair) -> str:
    """Return how many times faster an arm reached its rival's level, if that is settled."""
    speedup = pair.speedup
    arm = pair.arm.label
    rival = pair.rival.label
    goal = _target(analysis, speedup.threshold)
    if speedup.problem == FLAT:
        return f"No speedup: {rival} rises to 99 % of its own peak ({goal}) by no more than the interval of this rise."
    unit = unit_for(speedup.baseline_time)
    rival_time = duration(speedup.baseline_time, unit)
    faster = f"{_UNSETTLED} how much faster {arm} is than {rival}"
    if speedup.problem == SHORT or (speedup.never_reached and pair.arm.is_running):
        now = f"{arm} trains and is below {goal}" if pair.arm.is_running else f"{arm} ends below {goal}"
        at = duration(speedup.arm_end, unit)
        return f"{faster}: {now} at {at}, and {rival} reaches it after {rival_time}."
    if speedup.never_reached:
        line = f"{arm} never reached {goal}, which {rival} reaches after {rival_time}."
        if speedup.settled and speedup.ci_high > 0:
            line += f" By the 95 % interval it is at most {number(speedup.ci_high, SPEEDUP_DIGITS)} times as fast."
        elif not speedup.settled:
            line = f"{faster}: {line[:-1]}{_range_of(speedup)}."
        return line
    if speedup.arm_time <= 0:
        return f"{arm} has {goal} at its first evaluation, {rival} after {rival_time}."
    times = f"{duration(speedup.arm_time, unit)} against {rival_time}"
    if not speedup.settled:
        return f"{faster} to {goal}: {times}{_range_of(speedup)}."
    so_far = " so far" if pair.is_running else ""
    ratio = f"{number(speedup.speedup, SPEEDUP_DIGITS)} times {'faster than' if speedup.speedup >= 1 else 'as fast as'}"
    return f"{arm} is {ratio} {rival} to {goal}{so_far}: {times}{_range_of(speedup, ', settled')}."


def _range_of(speedup: Speedup, verdict: str = "") -> str:
    """Return what a speedup may be, or why nothing is known of it."""
    if math.isnan(speedup.ci_low):
        return ", with one run on a side"
    low = number(speedup.ci_low, SPEEDUP_DIGITS)
    high = number(speedup.ci_high, SPEEDUP_DIGITS)
    if speedup.ci_low > 0 and math.isfinite(speedup.ci_high):
        return f" (95 % interval {low} to {high} times as fast{verdict})"
    if speedup.ci_low > 0:
        return f" (95 % interval from {low} times as fast, without an upper end{verdict})"
    if math.isfinite(speedup.ci_high):
        return f" (95 % interval up to {high} times as fast{verdict})"
    return " (the 95 % interval has no end)"
