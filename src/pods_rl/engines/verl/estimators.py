"""Advantages under verl of groups of which a single row is trained.

verl looks an estimator up by its name once a batch is sampled. The replay buffer therefore installs the guards in the
registry of its own process, where verl also computes advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

# verl's estimators whose baseline is the group's other rows. The others use a critic or the complete batch.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "gdpo",
)

Estimator = Callable[..., tuple[Tensor, Tensor]]


def install_guards() -> None:
    """Make verl's group estimators give a group of one row advantage 0, in this process.

    verl trains such a row with its raw reward. `selection.advantages` gives it 0, because nothing is left to compare
    it with. It occurs where all but one of a prompt's sessions failed or have no usable reward.
    """
    from verl.trainer.ppo import core_algos

    for name in GROUP_ESTIMATORS:
        estimator = core_algos.ADV_ESTIMATOR_REGISTRY[name]
        if not hasattr(estimator, "__wrapped__"):  # an earlier buffer of the process may have installed it
            core_algos.ADV_ESTIMATOR_REGISTRY[name] = guarded(estimator)
    # verl calls this one by the name of its function and not through the registry.
    core_algos.compute_grpo_outcome_advantage = core_algos.ADV_ESTIMATOR_REGISTRY["grpo"]


def guarded(estimator: Estimator) -> Estimator:
    """Return the estimator with the reward 0 for rows that are alone in their group, so their advantage is 0.

    >>> def raw(token_level_rewards, response_mask, index):
    ...     return token_level_rewards, token_level_rewards
    >>> guarded(raw)(torch.tensor([[0.75], [0.5], [1.0]]), torch.ones(3, 1), np.array(["a", "b", "b"]))[0].tolist()
    [[0.0], [0.5], [1.0]]
    """

    @wraps(estimator)
    def with_guard(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        _, group_of_row, sizes = np.unique(index, return_inverse=True, return_counts=True)
        alone = torch.from_numpy(sizes[group_of_row] == 1).to(token_level_rewards.device)  # [rows]
        compared = token_level_rewards.masked_fill(alone.unsqueeze(-1), 0.0)  # [rows, T]
        return estimator(compared, response_mask, index, *arguments, **named)

    return with_guard
