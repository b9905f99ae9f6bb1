"""Users' rewards: each completion is scored separately, so that an error or a hang affects only one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from numbers import Real

from ..errors import UserError, raised
from .sandbox import pool
from .sandbox.pool import FreshPool
from .sandbox.processes import Reply, no_copies


@dataclass(frozen=True)
class RewardFailure:
    """Stands for the score of a completion whose reward raised, or took too long (`late`).

    `error` is the exception, if it was raised in this process.
    """

    reason: str
    late: bool = False
    error: BaseException | None = field(default=None, compare=False)


Scores = list[float] | list[float | RewardFailure]


def as_score(value: object) -> float | None:
    """Return a reward of one completion as a float; None is kept: the reward does not apply.

    Accepts every real number: of Python (bool, Fraction and Decimal too), and of numpy and torch, also as an array
    without axes. An integer beyond any float is infinite.

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


def attempt(reward: Callable[[str, str], float], text: str, gold: str) -> float | RewardFailure:
    """Return the score of one completion, or a RewardFailure if the reward raised.

    >>> attempt(lambda text, gold: float(text), "1", "")
    1.0
    """
    try:
        with no_copies():
            return reward(text, gold)
    except (Exception, SystemExit) as error:
        return RewardFailure(f"raised {raised(error)}", error=error)


def failure(reply: Reply, limit: float) -> RewardFailure:
    """Return the failure that a worker's reply without a score means, after at most `limit` seconds.

    >>> failure(Reply("timeout"), 5).reason
    'gave no score within 5 s'
    """
    if reply.kind == "timeout":
        return RewardFailure(f"gave no score within {limit:g} s", late=True)
    if reply.kind == "raised":
        return RewardFailure(f"raised {reply.value}")
    return RewardFailure("ended its process" if reply.kind == "crash" else "wrote into the pipe of its process")


class UserRewardPool(FreshPool):
    """Processes that call one user reward, or a library's scorer, each completion within `limit` seconds of wall time.

    The function's module is imported once in each of at most `size` processes; one that hangs is killed and replaced
    while the others work.

    Args:
        name: the reward's import path.
        limit: seconds of wall time, which also ends a reward that only waits.
        maker: makes the work instead, as `Reward.maker`.
    """

    def __init__(self, name: str, limit: float, size: int | None = None, maker: Sequence[str] = ()) -> None:
        super().__init__(size, limit, maker or ["pods_rl.rewards:scoring", name], runs_user_code=True)
        self._name = name

    def score(self, texts: Sequence[str], golds: Sequence[str]) -> list[float | RewardFailure]:
        """Score completions in order; a RewardFailure if the function raised, hung or ended its process.

        Raises UserError if the function cannot be imported in a process of its own.

        >>> pool = UserRewardPool("operator:eq", limit=60, size=1)
        >>> pool.score(["a", "b"], ["a", "a"])
        [1.0, 0.0]
        >>> pool.close()
        """
        replies = self.ask(list(zip(texts, golds, strict=True)), 0.0, self.limit)
        return [reply.value if reply.kind == "gave" else failure(reply, self.limit) for reply in replies]

    def start_error(self, reply: Reply, code: int | None) -> Exception:
        if reply.kind == "refused":  # by `get_reward`
            return UserError(reply.value)
        advice = ""
        if reply.kind == "timeout":
            why = f"the import took longer than {pool.START_LIMIT:g} s"
            advice = ", or set reward_seconds: null to import it in the training process alone"
        elif reply.lost:
            why = "the process ended while it imported the module" + (f", exit code {code}" if code else "")
        else:
            why = str(reply.value)
        return UserError(
            f"the reward {self._name!r} did not start in a process of its own: {why.rstrip('.')}. "
            f"Fix its module{advice}"
        )


def user_pool(name: str, limit: float, maker: tuple[str, ...] = ()) -> UserRewardPool:
    """Return this process's pool for a reward, made on first use.

    >>> user_pool("operator:eq", 60.0) is user_pool("operator:eq", 60.0)
    True
    """
    return _pool_of(name, limit, maker, os.getpid())


@lru_cache
def _pool_of(name: str, limit: float, maker: tuple[str, ...], owner: int) -> UserRewardPool:
    return UserRewardPool(name, limit, maker=maker)
