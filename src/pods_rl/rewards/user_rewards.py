"""Users' rewards in processes of their own: each completion is scored separately, so an error affects only one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from ..errors import UserError
from ..sandbox import pool
from ..sandbox.processes import Reply
from ..sandbox.scores import RewardFailure, failure


class UserRewardPool(pool.WorkerPool):
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
