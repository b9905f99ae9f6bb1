"""Which rollouts can be trained on, for every engine; what a selection did, for engines other than TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..selection import REWARD_LIMIT, is_constant, spread


def mark_unusable(rewards: Tensor, trained: Tensor | None = None) -> Tensor:
    """Return the rewards with NaN for rollouts that cannot be trained on, of any shape.

    These are rewards that are infinite or larger than 1e15 in size, and rollouts of which `trained` is false: an engine
    may mask all tokens of a failed rollout out of the loss. Kept, such a rollout would replace one that trains.

    >>> mark_unusable(torch.tensor([1.0, 0.0, torch.inf]), torch.tensor([True, False, True]))
    tensor([1., nan, nan])
    """
    rewards = rewards.masked_fill(rewards.abs() > REWARD_LIMIT, math.nan)
    if trained is not None:
        rewards = rewards.masked_fill(~trained.to(rewards.device), math.nan)
    return rewards


def pad_rewards(rewards: Sequence[Sequence[float | None]], trained: Sequence[Sequence[bool]] | None = None) -> Tensor:
    """Return groups of different sizes as one float64 tensor `[P, N]`, padded with NaN, which marks unusable rewards.

    >>> pad_rewards([[1.0, 0.0], [float("inf")]])
    tensor([[1., 0.],
            [nan, nan]], dtype=torch.float64)
    >>> pad_rewards([[1.0, None, 0.0]], [[True, True, False]])
    tensor([[1., nan, nan]], dtype=torch.float64)
    """
    largest = max(map(len, rewards), default=0)
    rewards_PN = torch.full((len(rewards), largest), math.nan, dtype=torch.float64)
    trained_PN = torch.ones(rewards_PN.shape, dtype=torch.bool)
    for row, group in enumerate(rewards):
        values = [math.nan if reward is None else float(reward) for reward in group]
        rewards_PN[row, : len(group)] = torch.tensor(values, dtype=torch.float64)
        if trained is not None:
            trained_PN[row, : len(group)] = torch.tensor(trained[row], dtype=torch.bool)
    return mark_unusable(rewards_PN, trained_PN)


def describe_selection(rewards_PN: Tensor, kept_PN: Tensor) -> dict[str, float]:
    """Return a step's metrics of rewards before and after selection (docs/metrics.md); empty if none is scored.

    >>> rewards = torch.tensor([[0.0, 1.0, 0.0, 0.5]])
    >>> describe_selection(rewards, torch.tensor([[True, True, False, False]]))["pods/selected/reward_mean"]
    0.5
    """
    if rewards_PN.isnan().all():
        return {}
    selected_PN = rewards_PN.masked_fill(~kept_PN, math.nan)
    # A rule over the batch keeps nothing of some prompts: they are not among the groups that are trained.
    trained_QN = selected_PN[kept_PN.any(dim=1)] if kept_PN.any() else selected_PN
    return {
        "pods/all/reward_mean": rewards_PN.nanmean().item(),
        "pods/all/reward_std": spread(rewards_PN.reshape(1, -1)).item(),
        "pods/all/zero_variance_share": is_constant(rewards_PN).double().mean().item(),
        "pods/selected/reward_mean": selected_PN.nanmean().item(),
        "pods/selected/reward_std": spread(trained_QN).mean().item(),
        "pods/zero_variance_share": is_constant(trained_QN).double().mean().item(),
    }
