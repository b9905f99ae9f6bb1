"""Rewards of groups as a tensor, and what a step's selection did to them: for engines other than TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..selection import REWARD_LIMIT, is_constant, spread


def pad_rewards(rewards: Sequence[Sequence[float]]) -> Tensor:
    """Return groups of different sizes as one float64 tensor `[P, N]`.

    Missing rollouts are NaN, and so are rewards that are infinite or larger than 1e15.

    >>> pad_rewards([[1.0, 0.0], [float("inf")]])
    tensor([[1., 0.],
            [nan, nan]], dtype=torch.float64)
    """
    largest = max(map(len, rewards), default=0)
    rewards_PN = torch.full((len(rewards), largest), math.nan, dtype=torch.float64)
    for row, group in enumerate(rewards):
        rewards_PN[row, : len(group)] = torch.tensor(group, dtype=torch.float64)
    return rewards_PN.masked_fill(rewards_PN.abs() > REWARD_LIMIT, math.nan)


def describe_selection(rewards_PN: Tensor, kept_PN: Tensor) -> dict[str, float]:
    """Return a step's metrics of rewards before and after selection (docs/metrics.md); empty if none is scored.

    >>> rewards = torch.tensor([[0.0, 1.0, 0.0, 0.5]])
    >>> describe_selection(rewards, torch.tensor([[True, True, False, False]]))["pods/selected/reward_mean"]
    0.5
    """
    if rewards_PN.isnan().all():
        return {}
    selected_PN = rewards_PN.masked_fill(~kept_PN, math.nan)
    constant_P = is_constant(selected_PN).double()
    return {
        "pods/all/reward_mean": rewards_PN.nanmean().item(),
        "pods/all/reward_std": spread(rewards_PN.reshape(1, -1)).item(),
        "pods/all/zero_variance_share": is_constant(rewards_PN).double().mean().item(),
        "pods/selected/reward_mean": selected_PN.nanmean().item(),
        "pods/selected/reward_std": spread(selected_PN).mean().item(),
        "pods/zero_variance_share": constant_P.mean().item(),
    }
