"""Advantages over all n sessions of a prompt, for the m that were kept: verl's estimator `pods_before`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from ...selection import Selection, advantages
from .settings import BEFORE

# uid -> rewards [N] of its group. The trainer computes advantages in the process, and before the next batch is sampled.
_REWARDS: dict[str, Tensor] = {}


def remember_rewards(rewards: Mapping[str, Tensor]) -> None:
    """Keep the rewards of all n sessions of the groups just sampled, in place of those of the batch before."""
    _REWARDS.clear()
    _REWARDS.update(rewards)


@register_adv_est(BEFORE)
def pods_before(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Each kept row's reward, centred on its group's n rewards and divided by their standard deviation.

    Source: PODS (arXiv 2504.13818), the arm "before" of its ablation; `selection.advantages`.

    Args:
        token_level_rewards: `[rows, T]`; a row's sum is its session's reward.
        response_mask: `[rows, T]`, 1 on the tokens that are trained.
        index: `[rows]`, each row's uid.
        config: verl's `algorithm`; `norm_adv_by_std_in_grpo: false` centres only.

    Returns:
        Advantages and returns, the same tensor `[rows, T]`. All trajectories of a session have its advantage.

    Raises:
        ValueError: a row of a group that PODS's replay buffer did not sample.
    """
    scale: Literal["group", "none"] = (
        "group" if config is None or config.get("norm_adv_by_std_in_grpo", True) else "none"
    )
    scores = token_level_rewards.sum(dim=-1)
    trained = response_mask.bool().any(dim=-1)
    result = torch.zeros_like(scores)
    for uid in dict.fromkeys(index[trained.cpu().numpy()].tolist()):  # verl's padding rows train no token
        if uid not in _REWARDS:
            raise ValueError(
                f"the estimator {BEFORE} knows no rewards of prompt {uid}: expected one that PODS's replay buffer "
                "sampled last. Set trainer.v1.sampler.custom_sampler, and leave skip.rollout_tq off."
            )
        rewards_1N = _REWARDS[uid][None]
        everything = Selection(torch.arange(rewards_1N.shape[1])[None])
        advantage_N = advantages(rewards_1N, everything, when="before", scale=scale)[0].to(scores)
        rows = torch.from_numpy(index == uid).to(scores.device)
        # A row has lost its session's number; its reward is, but for rounding, one of the group's.
        distance = (scores[rows, None].double() - _REWARDS[uid].to(scores.device)).abs().nan_to_num(nan=torch.inf)
        result[rows] = advantage_N[distance.argmin(dim=1)]
    tokens = result.unsqueeze(-1) * response_mask
    return tokens, tokens
