"""Rewards: pure functions `(text, gold) -> float` of a completion's text and the gold answer.

A reward is one function and one entry in `REWARDS`; a user's own comes in by dotted path (`get_reward`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from ..errors import UserError
from .answers import accuracy, accuracy_batch
from .extract import extract_answer, extract_gold
from .forms import format_reward, tag_count
from .pool import VerifierPool, default_pool

# Raise it whenever some completion would be scored differently: tasks carry it in their version.
GRADER_VERSION = "1"


@dataclass(frozen=True)
class Reward:
    """A named reward: call it with a completion's text and the gold answer.

    `score_many` scores a batch faster than one by one, where there is such a way. A score may be NaN: nobody
    could tell.

    >>> Reward("length", lambda text, gold: len(text))("abc", "")
    3.0
    """

    name: str
    score: Callable[[str, str], float]
    score_many: Callable[[Sequence[str], Sequence[str]], list[float]] | None = None

    def __call__(self, text: str, gold: str) -> float:
        """Score one completion. Raises TypeError where the function gives something other than a number."""
        return self._number(self.score(text, gold))

    def batch(self, texts: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Score completions in order. Raises ValueError where there is not one gold answer to each text."""
        if self.score_many:
            return self.score_many(texts, golds)
        return [self(text, gold) for text, gold in zip(texts, golds, strict=True)]

    def _number(self, score: object) -> float:
        if isinstance(score, (int, float)):
            return float(score)
        raise TypeError(f"reward {self.name!r} gave {score!r} of type {type(score).__name__}; it must give a float")


REWARDS: dict[str, Reward] = {
    "accuracy": Reward("accuracy", accuracy, accuracy_batch),
    "format": Reward("format", format_reward),
    "tag_count": Reward("tag_count", tag_count),
}


def get_reward(name: str) -> Reward:
    """Give the reward of that name, or the function at that dotted path (`package.module:function`).

    Raises UserError for an unknown name, with the nearest one, and for a path that leads to no function.

    >>> get_reward("accuracy").name, get_reward("operator:eq").name
    ('accuracy', 'operator:eq')
    """
    if name in REWARDS:
        return REWARDS[name]
    module, colon, function = name.partition(":")
    if not colon:
        module, _, function = name.rpartition(".")
    if not module or not function:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        raise UserError(
            f"unknown reward {name!r}" + (f"; did you mean {near[0]!r}?" if near else ";") + f" There are "
            f"{', '.join(REWARDS)}; your own is named by its path, as in 'package.module:function'"
        )
    return Reward(name, _import(name, module, function))


def _import(name: str, module: str, function: str) -> Callable[[str, str], float]:
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"reward {name!r} cannot be imported: {error}; check that {module!r} is on the Python path and "
            f"has a function {function!r}"
        ) from error
    if not callable(found):
        raise UserError(f"reward {name!r} is a {type(found).__name__}; expected a function (text, gold) -> float")
    return found


__all__ = [
    "GRADER_VERSION",
    "REWARDS",
    "Reward",
    "VerifierPool",
    "accuracy",
    "accuracy_batch",
    "default_pool",
    "extract_answer",
    "extract_gold",
    "format_reward",
    "get_reward",
    "tag_count",
]
