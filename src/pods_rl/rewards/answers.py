"""Grade the final answer of a completion. Mathematics other than numbers goes to the verifier pool."""

from __future__ import annotations

from collections.abc import Sequence

from .extraction import extract_answer, extract_gold
from .mathematics import Pair, decide
from .verifier import default_pool


def accuracy(text: str, gold: str) -> float:
    """Return 1.0 if the final answer of `text` is `gold`, else 0.0.

    Source: arXiv 2504.13818, experiments: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `extract_answer` finds the answer of the completion `text`; `gold` is the bare gold answer. Numbers are compared
    exactly (0.333 is not 1/3), then strings without styles and spacing. Other mathematics goes to a verifier process,
    which is killed at its time limit; the answer then scores 0.0. Numeric answers never start that process, and
    neither do answers that are obviously too large to evaluate, unless the gold answer is as large. An answer
    of more than `mathematics.MAX_LENGTH` characters is right only if it equals the gold answer to the letter.

    >>> accuracy("<think>9*2</think><answer>$18.00 a day</answer>", "18")
    1.0
    >>> accuracy("<answer>17 or 18</answer>", "18")
    0.0
    """
    return accuracy_batch([text], [gold])[0]


def accuracy_batch(texts: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Score many completions as `accuracy` does; symbolic ones in parallel, equal ones once.

    Raises ValueError if the lengths differ.

    >>> accuracy_batch(["#### 4", "#### 5"], ["4", "4"])
    [1.0, 0.0]
    """
    verdicts = [_decide(text, gold) for text, gold in zip(texts, golds, strict=True)]
    # Rollouts of a prompt often have the same answer, which is verified once.
    pairs = list(dict.fromkeys(verdict for verdict in verdicts if isinstance(verdict, tuple)))
    verified = dict(zip(pairs, default_pool().verify(pairs), strict=True)) if pairs else {}
    return [float(verified[verdict] if isinstance(verdict, tuple) else verdict) for verdict in verdicts]


def _decide(text: str, gold: str) -> bool | Pair:
    """Grade without symbolic mathematics, or return the pair (gold, answer) that needs it."""
    answer = extract_answer(text)
    gold = gold.strip()
    if answer is None or not gold:
        return False
    if answer == gold:
        return True
    return decide(answer, extract_gold(gold) or gold)
