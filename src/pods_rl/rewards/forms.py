"""Is the completion in the paper's form, `<think>...</think><answer>...</answer>`?"""

from __future__ import annotations

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PENALTY_PER_CHARACTER = 0.01
REWARD_PER_TAG = 0.025


def format_reward(text: str, gold: str = "") -> float:
    """Give 1.0 for `<think>...</think><answer>...</answer>` and nothing else, less 0.01 per stray character.

    Source: arXiv 2504.13818, single-GPU experiments, where it is weighted by 0.1. Range [0, 1].

    The think block runs from the first `<think>` to the first `</think>` after it, the answer block from the
    first `<answer>` after that to the first `</answer>` after it; without both, 0.0. Every character outside
    the two blocks (before, between, after) that is not whitespace is stray. `gold` is not used.

    >>> format_reward("<think>9*2=18</think>\\n<answer>18</answer>")
    1.0
    >>> format_reward("Sure: <think>9*2=18</think><answer>18</answer>")
    0.95
    """
    outside = _outside_blocks(text)
    if outside is None:
        return 0.0
    stray = sum(len(part) for part in outside.split())
    return max(0.0, round(1.0 - PENALTY_PER_CHARACTER * stray, 2))


def tag_count(text: str, gold: str = "") -> float:
    """Give 0.025 for each of the four tags that occurs exactly once.

    Source: arXiv 2504.13818, single-GPU experiments. Range [0, 0.1]. `gold` is not used.

    >>> tag_count("<think>a</think><answer>1</answer><answer>2</answer>")
    0.05
    """
    return round(REWARD_PER_TAG * sum(text.count(tag) == 1 for tag in TAGS), 3)


def _outside_blocks(text: str) -> str | None:
    outside, rest = "", text
    for opening, closing in (TAGS[:2], TAGS[2:]):
        before, found, block = rest.partition(opening)
        _, closed, rest = block.partition(closing)
        if not (found and closed):
            return None
        outside += before + " "
    return outside + rest
