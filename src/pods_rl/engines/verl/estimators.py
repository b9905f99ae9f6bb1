"""Advantages under verl: the estimator `pods_before`, and groups of which verl trains a single row.

verl looks an estimator up by its name once a batch is sampled. It passes the rows of that batch and no other object.
The replay buffer therefore installs both parts in the registry of its own process, where verl also computes advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...selection import Selection, advantages
from .groups import Group

BEFORE = "pods_before"

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


class AdvantagesBefore:
    """The estimator `pods_before`: advantages of the kept rows by the rewards of their group's n sessions.

    Source: PODS (arXiv 2504.13818), the arm "before" of its ablation; see `selection.advantages`.

    A replay buffer has one, gives it the rewards of each batch (`remember`), and installs it in verl's registry
    (`install_before`).

    >>> estimator = AdvantagesBefore()
    >>> estimator.remember([Group("a", (("a_0_0",), ("a_1_0",), ("a_2_0",)))], torch.tensor([[1.0, 0.0, 0.5]]))
    >>> scores = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> estimator(scores, torch.ones(2, 2), np.array(["a", "a"]), {"norm_adv_by_std_in_grpo": False})[0]
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """

    def __init__(self) -> None:
        self._rewards: dict[str, Tensor] = {}  # uid -> rewards [N] of each group of the batch sampled last

    def remember(self, groups: Sequence[Group], rewards_PN: Tensor) -> None:
        """Replace the known rewards, `[P, N]` with NaN where one is missing, by those of the latest batch."""
        self._rewards = {}
        for group, rewards_N in zip(groups, rewards_PN, strict=True):
            self._rewards[group.uid] = rewards_N

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, the same tensor `[rows, T]`. All rows of a session share its advantage.

        Args:
            token_level_rewards: `[rows, T]`; a row's sum is its session's reward.
            response_mask: `[rows, T]`, 1 on the tokens that are trained.
            index: `[rows]`, each row's uid.
            config: verl's `algorithm`; `norm_adv_by_std_in_grpo: false` only centres.

        Raises:
            ValueError: a row of a group that is not of the batch remembered last.
        """
        scale: Literal["group", "none"] = "group"
        if config is not None and not config.get("norm_adv_by_std_in_grpo", True):
            scale = "none"
        scores = token_level_rewards.sum(dim=-1)  # [rows]
        result = torch.zeros_like(scores)
        # In order of first appearance. Rows that train no token are verl's padding.
        trained = response_mask.bool().any(dim=-1).cpu().numpy()  # [rows]
        for uid in dict.fromkeys(index[trained].tolist()):
            rewards_N = self._rewards.get(uid)
            if rewards_N is None:
                raise ValueError(
                    f"the estimator {BEFORE} has no rewards of prompt {uid}: expected one that PODS's replay buffer "
                    "sampled last. Set trainer.v1.sampler.custom_sampler, and leave skip.rollout_tq off."
                )
            all_sessions = Selection(torch.arange(len(rewards_N))[None])
            advantages_1N = advantages(rewards_N[None], all_sessions, when="before", scale=scale)
            # Rows do not name their session: match each to the nearest reward of the group.
            rows = torch.from_numpy(index == uid).to(scores.device)
            distance = (scores[rows][:, None].double() - rewards_N.to(scores.device)).abs()  # [rows, N]
            nearest = distance.nan_to_num(nan=torch.inf).argmin(dim=1)
            result[rows] = advantages_1N[0].to(scores)[nearest]
        per_token = result.unsqueeze(-1) * response_mask  # [rows, T]
        return per_token, per_token


def install_before(estimator: AdvantagesBefore) -> None:
    """Make `algorithm.adv_estimator: pods_before` mean this estimator here; `register_adv_est` refuses a second one."""
    from verl.trainer.ppo import core_algos

    core_algos.ADV_ESTIMATOR_REGISTRY[BEFORE] = estimator


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
