"""Rewards that read no gold answer: form and length."""

from __future__ import annotations

from .extraction import ANSWER_CLOSES, ANSWER_OPENS
from .thinking import CLOSING, OPENING

TAGS = (OPENING, CLOSING, ANSWER_OPENS, ANSWER_CLOSES)
PENALTY_PER_CHARACTER = 0.01
REWARD_PER_TAG = 0.025


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
