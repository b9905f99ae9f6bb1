"""What a step logs about its rollouts. Names are defined in `docs/metrics.md`."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

Metrics = MutableMapping[str, list[float]]


def spread(rewards_PN: Tensor) -> Tensor:
    """Standard deviation (ddof 1) of each group's scored rewards, `[P]`; 0 with fewer than two."""
    return nanstd(rewards_PN, dim=1).flatten().nan_to_num(0.0)


def is_constant(rewards_PN: Tensor) -> Tensor:
    """Whether a group's scored rewards are all equal, `[P]`: it has nothing to teach."""
    scored = ~rewards_PN.isnan()
    high = rewards_PN.masked_fill(~scored, -torch.inf).amax(dim=1)
    low = rewards_PN.masked_fill(~scored, torch.inf).amin(dim=1)
    return high <= low


def log_selection(metrics: Metrics, rewards_PN: Tensor, kept_PM: Tensor) -> None:
    """Log the kept rollouts' rewards and the groups without spread, over all processes."""
    kept = rewards_PN.gather(1, kept_PM)
    constant = is_constant(kept)
    metrics["pods/selected/reward_mean"].append(kept.nanmean().item())
    metrics["pods/selected/reward_std"].append(spread(kept).mean().item())
    metrics["pods/zero_variance_groups"].append(float(constant.sum()))
    metrics["pods/zero_variance_share"].append(constant.float().mean().item())


def log_all_rollouts(metrics: Metrics, rewards_per_func: Tensor, rewards_PN: Tensor, names: list[str]) -> None:
    """Replace the reward statistics that TRL just logged over the kept rows by those over all n.

    Args:
        metrics: TRL's accumulator; the last entry of each name belongs to this generation.
        rewards_per_func: `[P * N, F]` over all processes.
        rewards_PN: the weighted sums.
        names: the F reward functions.
    """
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"][-1] = rewards_per_func[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"][-1] = nanstd(rewards_per_func[:, i]).item()
    metrics["reward"][-1] = rewards_PN.nanmean().item()
    metrics["reward_std"][-1] = nanstd(rewards_PN.flatten()).item()
    metrics["frac_reward_zero_std"][-1] = is_constant(rewards_PN).float().mean().item()
