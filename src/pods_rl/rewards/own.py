"""Rewards of a user's own: each completion is scored apart, so that one that raises or hangs costs no other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import raised
from .pool import WorkerPool


@dataclass(frozen=True)
class Failure:
    """Stands for the score of a completion that has none: its reward raised, or took too long (`late`)."""

    reason: str
    late: bool = False


def attempt(reward: Callable[[str, str], float], text: str, gold: str) -> float | Failure:
    """The score of one completion, or what the reward raised.

    >>> attempt(lambda text, gold: float(text), "1", "")
    1.0
    """
    try:
        return reward(text, gold)
    except Exception as error:
        return Failure(f"raised {raised(error)}")


class OwnPool(WorkerPool):
    """Processes that call one reward of a user's, each completion within `limit` seconds of wall time.

    The function's module is imported once in each of at most `size` processes; one that hangs is killed and replaced
    while the others go on.

    Args:
        name: the reward's import path.
        limit: seconds of wall time, so that one that waits without working is found too.
    """

    def __init__(self, name: str, limit: float, size: int | None = None) -> None:
        super().__init__(size, limit, function=name)

    def score(self, texts: Sequence[str], golds: Sequence[str]) -> list[float | Failure]:
        """Each completion's score in order, a Failure where the function raised, hung or took its process along.

        Raises UserError where the function cannot be imported in a process of its own.

        >>> pool = OwnPool("operator:eq", limit=60, size=1)
        >>> pool.score(["a", "b"], ["a", "a"])
        [1.0, 0.0]
        >>> pool.close()
        """
        pairs = list(zip(texts, golds, strict=True))
        replies = self._threads.map(lambda pair: self.ask_one(pair, 0.0, self.limit), pairs)
        return [self._read(reply) for reply in replies]

    def _read(self, reply: str) -> float | Failure:
        if reply == "timeout":
            return Failure(f"gave no score within {self.limit:g} s", late=True)
        if reply == "crash":
            return Failure("ended its process")
        answer = json.loads(reply)
        return Failure(f"raised {answer['raised']}") if isinstance(answer, dict) else float(answer)


def own_pool(name: str, limit: float) -> OwnPool:
    """This process's pool for a reward, made on first use.

    >>> own_pool("operator:eq", 60.0) is own_pool("operator:eq", 60.0)
    True
    """
    return _pool_of(name, limit, os.getpid())


@lru_cache
def _pool_of(name: str, limit: float, owner: int) -> OwnPool:
    return OwnPool(name, limit)
