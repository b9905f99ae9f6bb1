"""Users' rewards in processes of their own: each completion is scored separately, so an error affects only one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from ..sandbox.pool import WorkerPool
from ..sandbox.scores import RewardFailure, failure


class UserRewardPool(WorkerPool):
    """Processes that call one user reward, or a library's scorer, each completion within `limit` seconds of wall time.

    Args:
        name: the reward's import path. Its module is imported once in each process.
        limit: seconds of wall time, which also ends a reward that only waits.
        size: as for `WorkerPool`.
        maker: makes the work instead, as `Reward.maker`.
    """

    def __init__(self, name: str, limit: float, size: int | None = None, maker: Sequence[str] = ()) -> None:
        super().__init__(
            size, limit, maker or ["pods_rl.rewards:scoring", name], runs_user_code=True, name=f"the reward {name!r}",
            advice="Fix its module, or set reward_seconds: null to import it in the training process alone",
        )  # fmt: skip

    def score(self, texts: Sequence[str], golds: Sequence[str]) -> list[float | RewardFailure]:
        """Score completions in order; a RewardFailure if the function raised, hung or ended its process.

        Raises UserError if the function cannot be imported in a process of its own.

        >>> pool = UserRewardPool("operator:eq", limit=60, size=1)
        >>> pool.score(["a", "b"], ["a", "a"])
        [1.0, 0.0]
        >>> pool.close()
        """
        replies = self.ask(list(zip(texts, golds, strict=True)), self.limit)
        return [reply.value if reply.kind == "gave" else failure(reply, self.limit) for reply in replies]


@lru_cache
def user_pool(name: str, limit: float, maker: tuple[str, ...] = ()) -> UserRewardPool:
    """Return this process's pool for a reward, made on first use.

    >>> user_pool("operator:eq", 60.0) is user_pool("operator:eq", 60.0)
    True
    """
    return UserRewardPool(name, limit, maker=maker)


os.register_at_fork(after_in_child=user_pool.cache_clear)
