"""Rewards: pure functions `(text, gold) -> float` of a completion's text and the gold answer.

A reward is one function and one entry in `REWARDS`; a user's own is named by its dotted path (`get_reward`). One of
them, `overlong`, reads the number of tokens of a completion instead. `docs/rewards.md` describes each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from inspect import iscoroutinefunction, signature
from typing import Any, Literal

from ..errors import UserError, raised
from ..sandbox import RewardFailure, Scores, as_score, failure
from ..sandbox.pool import WorkerPool
from ..sandbox.worker import Work, no_copies
from ..text import find
from .answers import accuracy, accuracy_batch
from .chemistry import chemistry, choice, equation
from .extraction import extract_answer, extract_gold
from .graded import format_reward, overlong, tag_count
from .thinking import graded_text
from .verifier import VerifierPool, default_pool

# Raise it whenever some completion would be scored differently: tasks carry it in their version.
GRADER_VERSION = "11"
LIBRARY_SECONDS = 60.0  # that a library's scorer may take for a completion, if nothing else is set


@dataclass(frozen=True)
class Reward:
    """A named reward: call it with a completion's text and the gold answer.

    A score may be NaN, if it is not known.

    Attributes:
        name: its key in `REWARDS`, or the path of a user's function.
        score: the function of a text and its gold answer.
        score_many: scores a batch faster than one by one. If None, `score` is called for each.
        reads: with "tokens" the function takes `(tokens, limit)` and is called through `of_lengths`.
        verifies: whether it uses the verifier processes.
        maker: of a library's scorer, the path of the function that makes the `Work` of its processes, and the
            function's arguments.
        gold: returns the answer in a gold answer that holds more, or None if it is not known.

    >>> Reward("length", lambda text, gold: len(text))("abc", "")
    3.0
    """

    name: str
    score: Callable[..., Any]
    score_many: Callable[[Sequence[str], Sequence[str]], list[float]] | None = None
    reads: Literal["text", "tokens"] = "text"
    verifies: bool = False
    maker: tuple[str, ...] = ()
    gold: Callable[[str], str | None] = str

    def __call__(self, text: str, gold: str) -> float:
        """Score one completion. Raises TypeError if the function does not return a number."""
        return self._number(self.score(text, gold))

    def batch(self, texts: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Score completions in order. Raises ValueError unless there is one gold answer per text."""
        if self.score_many:
            return self.score_many(texts, golds)
        return [self(text, gold) for text, gold in zip(texts, golds, strict=True)]

    def of_lengths(self, tokens: Sequence[int], limit: int) -> list[float]:
        """Score completions by their length in tokens, of at most `limit`.

        >>> REWARDS["overlong"].of_lengths([50, 100], limit=100)
        [0.0, -1.0]
        """
        return [self._number(self.score(count, limit)) for count in tokens]

    def _number(self, score: object) -> float:
        number = None
        with suppress(TypeError):
            number = as_score(score)
        if number is None:
            raise TypeError(f"reward {self.name!r} returned {score!r} of type {type(score).__name__}; expected a float")
        return number


_BUILT_IN = (
    Reward("accuracy", accuracy, accuracy_batch, verifies=True),
    Reward("format", format_reward),
    Reward("tag_count", tag_count),
    Reward("choice", choice),
    Reward("equation", equation),
    Reward("chemistry", chemistry),
    Reward("overlong", overlong, reads="tokens"),
)
REWARDS: dict[str, Reward] = {reward.name: reward for reward in _BUILT_IN}


def get_reward(name: str) -> Reward:
    """Return the reward of that name, or the function at that dotted path (`package.module:function`).

    Raises UserError for an unknown name, with the nearest one, and for a path that does not lead to a function.

    >>> get_reward("accuracy").name, get_reward("operator:eq").name
    ('accuracy', 'operator:eq')
    """
    reward = find("reward", name, REWARDS)
    if isinstance(reward, Reward):
        return reward
    kind = None
    if isinstance(reward, type):
        kind = "a class"
    elif iscoroutinefunction(reward):
        kind = "async"
    if kind:
        raise UserError(f"the reward '{name}' is {kind}: give a plain function of (text, gold), or a callable object")
    _check_signature(name, reward)
    return Reward(name, reward)


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    """Raise UserError for a function that cannot be called with a completion and its gold answer, such as TRL's."""
    try:
        parameters = signature(function)
    except ValueError:  # some functions of C have none
        return
    with suppress(TypeError):
        parameters.bind("text", "gold")
        first_name = next(iter(parameters.parameters))
        # "self" is of a method without its object, and the others are of TRL's form.
        if first_name not in ("completions", "prompts", "self"):
            return
    raise UserError(
        f"the reward '{name}' takes {parameters}: a reward of a recipe scores one completion, as in "
        "`def reward(text: str, gold: str) -> float`. TRL's form, (completions, **kwargs) -> list, is for PODSTrainer "
        "in a script"
    )


def _is_path(name: object) -> bool:
    """Return whether the name of a reward, which may be any value of a recipe, is the import path of a function."""
    return isinstance(name, str) and (":" in name or "." in name)


def check_reward(name: str, seconds: float | None) -> None:
    """Raise like `get_reward`. A user's own module is imported in a worker first, since it may do anything.

    With `seconds` None the function is called in this process (`score`), so it is imported here only.

    Raises:
        UserError: also if its module ends the process that imports it, or takes too long.

    >>> check_reward("accuracy", seconds=60)
    """
    if seconds is not None and _is_path(name):
        user_pool(name).start()
    get_reward(name)


def check_named_rewards(values: Mapping[str, Any]) -> None:
    """Check each reward that a recipe's values name, except that of a library's task (`library:NAME`)."""
    library = None
    task = str(values.get("task"))
    if ":" in task:
        library, _, _ = task.partition(":")
    for name in values["task_rewards"] or ():
        if name != library:
            check_reward(name, values["reward_seconds"])


@lru_cache
def user_pool(name: str, maker: tuple[str, ...] = ()) -> WorkerPool:
    """Return this process's pool for a reward, made on first use."""
    return WorkerPool(
        None,
        maker or ["pods_rl.rewards:scoring", name],
        runs_user_code=True,
        name=f"the reward {name!r}",
        advice="Fix its module, or set reward_seconds: null to import it in the training process alone",
    )


os.register_at_fork(after_in_child=user_pool.cache_clear)


def scoring(name: str) -> Work:
    """Return the work of a `user_pool`'s worker: import the reward once, then score texts against gold answers."""
    reward = get_reward(name)
    return Work(lambda pair: reward(*pair))


def score(reward: Reward, texts: Sequence[str], golds: Sequence[str], seconds: float | None) -> Scores:
    """Return the scores of a reward, in order; a user's reward scores each completion separately.

    If it raises, takes longer than `seconds` or ends its process, the score is a RewardFailure. If `seconds` is None,
    or no other process can import the function by its name, it runs in this process without a limit. A library's scorer
    (`Reward.maker`) always has a separate process, in which None means 60 seconds.

    >>> score(get_reward("operator:eq"), ["a"], ["a"], None)
    [1.0]
    """
    if reward.name in REWARDS and not reward.maker:
        return reward.batch(texts, golds)
    pairs = list(zip(texts, golds, strict=True))
    if not reward.maker and (seconds is None or not _is_path(reward.name)):
        return [attempt(reward, *pair) for pair in pairs]
    limit = seconds or LIBRARY_SECONDS
    # by name alone where `check_reward` has started it: each form of the call has a pool of its own
    pool = user_pool(reward.name, reward.maker) if reward.maker else user_pool(reward.name)
    replies = pool.ask(pairs, limit)
    return [reply.value if reply.kind == "gave" else failure(reply, limit) for reply in replies]


def attempt(reward: Callable[[str, str], float], text: str, gold: str) -> float | RewardFailure:
    """Return the score of one completion, or a RewardFailure if the reward raised."""
    try:
        with no_copies():
            return reward(text, gold)
    except (Exception, SystemExit) as error:
        return RewardFailure(f"raised {raised(error)}", error=error)


__all__ = [
    "GRADER_VERSION", "REWARDS", "Reward", "VerifierPool", "accuracy", "accuracy_batch", "check_named_rewards",
    "check_reward", "chemistry", "choice", "default_pool", "equation", "extract_answer", "extract_gold",
    "format_reward", "get_reward", "graded_text", "overlong", "score", "tag_count",
]  # fmt: skip
