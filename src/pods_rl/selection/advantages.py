"""How much better than its group each kept rollout was."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .types import Selection
from .validation import check_rewards


def advantages(
    rewards_PN: Tensor,
    selection: Selection,
    *,
    when: Literal["after", "before"] = "after",
    scale: Literal["group", "batch", "none"] = "group",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    epsilon: float = 1e-4,
) -> Tensor:
    """Each kept rollout's reward, less its group's baseline and divided by a standard deviation.

    Source: PODS (arXiv 2504.13818), section 3.2: a_{S,i} = (r_i - mean(r_S)) / std(r_S), with ddof = 1 and
    1e-4 added to the deviation as in the authors' code. The ways to scale are those of TRL's `scale_rewards`.
    Leave-one-out is RLOO (arXiv 2402.14740), r_i less the mean of the others, as TRL's `RLOOTrainer`
    computes it. With all m scored it is m / (m - 1) times the centred reward.

    Args:
        rewards_PN: `[P, N]`, finite or NaN.
        selection: the rollouts kept of each prompt.
        when: "after" takes mean and deviation of the m kept rewards (the paper), "before" of all n.
        scale: divide by the deviation of the "group", of the whole "batch" (all prompts' rewards), or "none".
        baseline: what is subtracted: the group's "mean", or for each rollout the mean of the others. With
            "leave_one_out", "batch" standardises the batch's advantages (TRL's `normalize_advantages`).
        epsilon: added to the deviation, in units of reward.

    Returns:
        `[P, M]`, in float64 for float64 and integer rewards, else in float32, times any `selection.weights`.

    Edges: NaN rewards count in no mean or deviation and have advantage 0. A group of equal rewards, or of one
    scored rollout (m = 1), has advantages of exactly 0. Huge rewards do not overflow.

    Raises:
        ValueError: an unknown `when`, `scale` or `baseline`, leave-one-out scaled by the group (its deviation holds
            the reward that was left out), an infinite reward, a selection that does not fit, or (scale "none") a
            difference of rewards that the dtype cannot hold.

    >>> kept = Selection(torch.tensor([[0, 1, 2, 3]]))
    >>> advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]]), kept)
    tensor([[ 0.8659, -0.8659,  0.8659, -0.8659]])
    """
    _check_choice("when", when, ("after", "before"))
    _check_choice("scale", scale, ("group", "batch", "none"))
    _check_choice("baseline", baseline, ("mean", "leave_one_out"))
    if baseline == "leave_one_out" and scale == "group":
        raise ValueError("baseline 'leave_one_out' goes with scale 'none' or 'batch'; got 'group', which undoes it.")
    rewards_PN, _ = check_rewards(rewards_PN)
    kept_PM = selection.take(rewards_PN)
    reference_PR = kept_PM if when == "after" else rewards_PN

    shrink = _shrink(reference_PR, per_group=scale != "batch")
    shrunk_PR = reference_PR * shrink
    centre = _less_mean if baseline == "mean" else _less_others
    centred_PM = centre(kept_PM * shrink, shrunk_PR)
    if scale == "none":
        scaled_PM = centred_PM / shrink
        _check_representable(scaled_PM)
    elif baseline == "leave_one_out":
        everyone_1R = _less_others(shrunk_PR, shrunk_PR).reshape(1, -1)
        scaled_PM = (centred_PM - everyone_1R.nanmean()) / (_nan_std(everyone_1R) + epsilon * shrink)
    else:
        deviation = _nan_std(shrunk_PR if scale == "group" else shrunk_PR.reshape(1, -1))
        scaled_PM = centred_PM / (deviation + epsilon * shrink)

    scaled_PM = scaled_PM.nan_to_num(nan=0.0).masked_fill(is_constant(reference_PR).unsqueeze(1), 0.0)
    return scaled_PM if selection.weights is None else scaled_PM * selection.weights


def spread(rewards_PN: Tensor) -> Tensor:
    """Return the standard deviation (ddof = 1) of each group's scored rewards, `[P]`; 0 with fewer than two."""
    return _nan_std(rewards_PN).squeeze(1).nan_to_num(nan=0.0)


def is_constant(rewards_PN: Tensor) -> Tensor:
    """Return whether each group's scored rewards are all equal, `[P]`; true where none is scored."""
    high_P = rewards_PN.nan_to_num(nan=-math.inf).amax(dim=1)
    return rewards_PN.nan_to_num(nan=math.inf).amin(dim=1) >= high_P


def _less_mean(values_PM: Tensor, group_PR: Tensor) -> Tensor:
    return values_PM - group_PR.nanmean(dim=1, keepdim=True)


def _less_others(values_PM: Tensor, group_PR: Tensor) -> Tensor:
    """Each value less the mean of its group's other numbers; NaN where there is none."""
    others_P1 = (~group_PR.isnan()).sum(dim=1, keepdim=True) - 1
    return values_PM - (group_PR.nansum(dim=1, keepdim=True) - values_PM) / others_P1


def _shrink(values_PR: Tensor, *, per_group: bool) -> Tensor:
    """A power of two that keeps squares of huge rewards finite, 1 for ordinary ones: `[P, 1]` or `[1, 1]`."""
    exponent = 1024 if values_PR.dtype == torch.float64 else 128
    largest = values_PR.nan_to_num(nan=0.0).abs().amax(dim=1 if per_group else (0, 1), keepdim=True)
    return torch.ones_like(largest).masked_fill(largest > 2.0 ** (exponent * 3 // 8), 2.0 ** (-exponent * 3 // 4))


def _nan_std(values_PR: Tensor) -> Tensor:
    """Standard deviation (ddof = 1) of a row's numbers, NaN left out; NaN if there is one alone: `[P, 1]`."""
    mean_P1 = values_PR.nanmean(dim=1, keepdim=True)
    count_P1 = (~values_PR.isnan()).sum(dim=1, keepdim=True, dtype=values_PR.dtype)
    variance_P1 = (values_PR - mean_P1).square().nanmean(dim=1, keepdim=True)
    return (variance_P1 * (count_P1 / (count_P1 - 1))).sqrt()


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.")


def _check_representable(advantages_PM: Tensor) -> None:
    overflown_P = advantages_PM.isinf().any(dim=1)
    if overflown_P.any():
        raise ValueError(
            f"the rewards of group {int(overflown_P.nonzero()[0])} differ by more than {advantages_PM.dtype} "
            "can hold. Clamp the rewards, or scale advantages by 'group'."
        )
