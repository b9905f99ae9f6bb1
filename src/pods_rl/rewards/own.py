"""Rewards of a user's own: each completion is scored apart, so that one that raises or hangs costs no other."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from numbers import Real

from ..errors import raised
from .pool import WorkerPool
from .processes import no_copies


@dataclass(frozen=True)
class Failure:
    """Stands for the score of a completion that has none: its reward raised, or took too long (`late`).

    `error` is what it raised, where that was in this process.
    """

    reason: str
    late: bool = False
    error: BaseException | None = field(default=None, compare=False)


Scores = list[float] | list[float | Failure]


def as_score(value: object) -> float | None:
    """What a reward gave for one completion, as a float; None stays: the reward does not apply.

    Takes every real number: of Python (bool, Fraction and Decimal too), and of numpy and torch, also as an array
    without an axis. An integer beyond any float is infinite.

    Raises:
        TypeError: text, a complex number, or anything else.

    >>> as_score(True), as_score(None), as_score(-10**400)
    (1.0, None, -inf)
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy and torch
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:  # a tensor without data
            raise TypeError(f"expected a number, got {type(value).__name__}: {error}") from error
    if value is None:
        return None
    if not isinstance(value, (Real, Decimal)):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except ValueError:  # a signalling NaN of Decimal
        return math.nan


def attempt(reward: Callable[[str, str], float], text: str, gold: str) -> float | Failure:
    """The score of one completion, or what the reward raised.

    >>> attempt(lambda text, gold: float(text), "1", "")
    1.0
    """
    try:
        with no_copies():
            return reward(text, gold)
    except (Exception, SystemExit) as error:
        return Failure(f"raised {raised(error)}", error=error)


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
        if reply == "garbled":
            return Failure("wrote into the pipe of its process")
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
