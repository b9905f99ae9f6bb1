"""What every function of this room asks of its tensors, and the words for what came instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def describe(value: Any) -> str:
    """Say what came, for an error message.

    >>> describe(torch.zeros(2, 3)), describe([1.0, 2.0])
    ('a torch.float32 tensor of shape [2, 3]', 'a list')
    """
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def check_rewards(rewards_PN: Tensor) -> tuple[Tensor, bool]:
    """The rewards as this room computes on them: detached, float32 or float64, free of infinities.

    Args:
        rewards_PN: `[P, N]`, any real dtype. float64 stays; float32 and half precision become float32,
            integers and booleans float64, so no order or tie changes (integers up to 2^53).

    Returns:
        The converted rewards on their own device, and whether all are scored (NaN marks one that is not).

    Raises:
        TypeError: no tensor, or complex numbers.
        ValueError: not two axes, no rollouts, or an infinite reward (one device synchronisation finds it).

    >>> check_rewards(torch.tensor([[True, False]]))
    (tensor([[1., 0.]], dtype=torch.float64), True)
    """
    if not isinstance(rewards_PN, Tensor) or rewards_PN.is_complex():
        raise TypeError(
            f"rewards must be a real tensor of shape [prompts, rollouts]; got {describe(rewards_PN)}. "
            "Pass torch.tensor(rewards)."
        )
    if rewards_PN.ndim != 2 or rewards_PN.shape[1] == 0:
        raise ValueError(
            f"rewards must have shape [prompts, rollouts], at least one rollout; got {describe(rewards_PN)}. "
            "For one group pass rewards[None]; for a flat list of rows pass rewards.view(-1, num_rollouts)."
        )
    single = rewards_PN.is_floating_point() and rewards_PN.dtype != torch.float64
    rewards_PN = rewards_PN.detach().float() if single else rewards_PN.detach().double()
    # A sum is far cheaper than a look at each reward; it is finite only where all rewards are.
    if rewards_PN.sum().isfinite():
        return rewards_PN, True
    _refuse_infinite(rewards_PN)
    return rewards_PN, not bool(rewards_PN.isnan().any())


def check_size(m: int, n: int) -> None:
    """Refuse an m that n rollouts cannot give.

    >>> check_size(9, 8)
    Traceback (most recent call last):
    ValueError: m must be between 1 and the 8 rollouts of each prompt; got m = 9. Keep fewer or generate more.
    """
    if isinstance(m, bool) or not isinstance(m, int):
        raise TypeError(f"m, the rollouts to keep of each prompt, must be an int; got {m!r} ({describe(m)}).")
    if not 1 <= m <= n:
        raise ValueError(
            f"m must be between 1 and the {n} rollouts of each prompt; got m = {m}. Keep fewer or generate more."
        )


def _refuse_infinite(rewards_PN: Tensor) -> None:
    infinite_PN = rewards_PN.isinf()
    groups = infinite_PN.any(dim=1).nonzero().flatten().tolist()
    if not groups:
        return
    rollout = int(infinite_PN[groups[0]].nonzero()[0])
    more = f" and {len(groups) - 1} more groups" if len(groups) > 1 else ""
    raise ValueError(
        f"{int(infinite_PN.sum())} of {rewards_PN.numel()} rewards are infinite, in group {groups[0]}{more} "
        f"(first: {rewards_PN[groups[0], rollout].item()} at rollout {rollout}). Rewards must be finite: "
        "clamp them, or return NaN for a rollout that cannot be scored."
    )
