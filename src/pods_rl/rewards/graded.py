"""Graded rewards without mathematics: form, length, arithmetic on given numbers."""

from __future__ import annotations

from fractions import Fraction

from .extraction import ANSWER_CLOSES, ANSWER_OPENS, extract_answer
from .mathematics import read_expression
from .thinking import CLOSING, OPENING

TAGS = (OPENING, CLOSING, ANSWER_OPENS, ANSWER_CLOSES)
PENALTY_PER_CHARACTER = 0.01
REWARD_PER_TAG = 0.025
MAX_EXPRESSION = 400  # characters of an expression: bounds depth, size of numbers and time
USES_THE_NUMBERS = Fraction(1, 10)  # partial credit: every number used once, at any distance
CLOSENESS = Fraction(1, 5)  # plus up to this much, the nearer to the target


def format_reward(text: str, gold: str = "") -> float:
    """Return 1.0 for `<think>...</think><answer>...</answer>`, minus 0.01 for each character outside of it.

    Source: arXiv 2504.13818, single-GPU experiments, where it is weighted by 0.1. Range [0, 1].

    The think block runs from the first `<think>` to the first `</think>` after it, the answer block from the
    first `<answer>` after that to the first `</answer>` after it; without both, 0.0. Every character outside
    the two blocks (before, between, after) that is not whitespace is stray. `gold` is not used.

    >>> format_reward("<think>9*2=18</think>\\n<answer>18</answer>")
    1.0
    >>> format_reward("Sure: <think>9*2=18</think><answer>18</answer>")
    0.95
    """
    outside = ""
    rest = text
    for opening, closing in (TAGS[:2], TAGS[2:]):
        before, _, block = rest.partition(opening)
        _, closed, rest = block.partition(closing)
        if not closed:
            return 0.0
        outside += before
    outside += rest
    stray = len("".join(outside.split()))
    return max(0.0, round(1.0 - PENALTY_PER_CHARACTER * stray, 2))


def tag_count(text: str, gold: str = "") -> float:
    """Return 0.025 for each of the four tags that occurs exactly once.

    Source: arXiv 2504.13818, single-GPU experiments. Range [0, 0.1]. `gold` is not used.

    >>> tag_count("<think>a</think><answer>1</answer><answer>2</answer>")
    0.05
    """
    single = [tag for tag in TAGS if text.count(tag) == 1]
    return round(REWARD_PER_TAG * len(single), 3)


def overlong(tokens: int, limit: int) -> float:
    """Return 0.0 for a completion of up to four fifths of `limit` tokens, falling linearly to -1.0 at `limit`.

    Source: DAPO (arXiv 2503.14476), equation 13, whose penalty grows over the last 4096 of 20480 tokens. Range [-1, 0].

    `tokens` is the length of a completion, `limit` the most it can have, at least 1.

    >>> overlong(80, 100), overlong(90, 100), overlong(100, 100)
    (0.0, -0.5, -1.0)
    """
    buffer = max(1, limit // 5)
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


def countdown(text: str, gold: str) -> float:
    r"""Return 1.0 if the final answer reaches the target with the given numbers, less if only its value is wrong.

    Source: arXiv 2504.13818 asks for verifiable rewards; this one is graded. Range [0, 1].

    `text` is a completion, its answer found by `extract_answer`; `gold` is one right expression: its numbers are the
    given ones and its value is the target. An answer may contain numbers, `+ - * / ( )`, `× ÷` and their LaTeX; a
    trailing `= 24` must be true. One with exactly the given numbers but another value v scores
    0.1 + 0.2 / (1 + |v - target|), so 0.2 if it is off by one and 0.1 far away; anything else scores 0.0.

    >>> countdown("<answer>(5 - 1) * 6 = 24</answer>", "6*(5-1)"), countdown(r"\boxed{5 \times 6 - 1}", "6*(5-1)")
    (1.0, 0.1333)
    >>> countdown("<answer>4 * 6</answer>", "6*(5-1)")
    0.0
    """
    answer = extract_answer(text)
    if answer is None or len(answer) > MAX_EXPRESSION:
        return 0.0
    gold_expression = read_expression(gold)
    answer_expression = read_expression(answer)
    if gold_expression is None or answer_expression is None:
        return 0.0
    target, numbers = gold_expression
    value, numbers_used = answer_expression
    if numbers_used != numbers:
        return 0.0
    if value == target:
        return 1.0
    return round(float(USES_THE_NUMBERS + CLOSENESS / (1 + abs(value - target))), 4)
