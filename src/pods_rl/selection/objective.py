"""From kept rollouts to a loss: group advantages, and the PODS loss as a reference to compare engines with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .types import BatchSelection, Selection, check_device, check_not_negative, check_tensor, checked_rewards, kind_of

# Sums of equal parts in two orders differ by rounding, in float32 by a few times 6e-8 of their size.
CONSTANT_TOLERANCE = 5e-7  # of the magnitude of a group's rewards
CONSTANT_FLOOR = 1e-12  # where parts cancel, rounding is that of the parts and not of their sum
_CHOICES = {"when": ("after", "before"), "scale": ("group", "batch", "none"), "baseline": ("mean", "leave_one_out")}


def advantages(
    rewards_PN: Tensor,
    selection: Selection | BatchSelection,
    *,
    when: Literal["after", "before"] = "after",
    scale: Literal["group", "batch", "none"] = "group",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    epsilon: float = 1e-4,
    tolerance: float = 0.0,
) -> Tensor:
    """Return each kept rollout's reward minus its group's baseline, divided by a standard deviation.

    Source: PODS (arXiv 2504.13818), section 3.2: a_{S,i} = (r_i - mean(r_S)) / std(r_S), with ddof = 1 and
    1e-4 added to the deviation as in the authors' code. `scale` is TRL's `scale_rewards`. Leave-one-out is
    RLOO (arXiv 2402.14740), r_i minus the mean of the others, as TRL's `RLOOTrainer` computes it.

    Args:
        rewards_PN: `[P, N]`, finite or NaN.
        selection: the rollouts kept of each prompt, or of the batch.
        when: "after" takes mean and deviation of the prompt's kept rewards (the paper), "before" of all n.
        scale: divide by the deviation of the "group", of the "batch" (all prompts' rewards), or "none".
        baseline: the group's "mean", or for each rollout the mean of the others ("leave_one_out"). With the
            latter, "batch" standardises the batch's advantages (TRL's `normalize_advantages`).
        epsilon: added to the deviation, in units of reward; at least 0.
        tolerance: of `is_constant`, which gives groups of equal rewards advantages of 0.

    Returns:
        `[P, M]`, or `[R]` in the order of `indices` for a `BatchSelection`; float64 for float64 and integer rewards,
        else float32.

    Edges: NaN rewards do not count in any mean or deviation, and have advantage 0. A group of equal rewards
    (`is_constant`), or of one scored rollout, has advantages of exactly 0. Rewards above 1e15 may overflow in float32.
    Scaled by the "group", a kept group with a small spread has advantages as large as one with a large spread.

    Raises:
        TypeError: rewards that are not a tensor, a selection of another type, or an epsilon that is not a number.
        ValueError: an unknown `when`, `scale` or `baseline`; leave-one-out scaled by the group; an infinite reward;
            a selection that does not fit; a negative epsilon.

    >>> kept = Selection(torch.tensor([[0, 1, 2, 3]]))
    >>> advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]]), kept)
    tensor([[ 0.8659, -0.8659,  0.8659, -0.8659]])
    """
    for name, value in {"when": when, "scale": scale, "baseline": baseline}.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}; got {value!r}.")
    if baseline == "leave_one_out" and scale == "group":
        raise ValueError("baseline 'leave_one_out' goes with scale 'none' or 'batch'; got 'group', which undoes it.")
    check_not_negative("epsilon", epsilon)
    if not isinstance(selection, Selection | BatchSelection):
        raise TypeError(
            f"selection must be a Selection, as `select` returns it, or a BatchSelection; got {kind_of(selection)}. "
            "Pass Selection(indices) with the int64 indices [P, M] of the kept rollouts."
        )
    rewards_PN, _ = checked_rewards(rewards_PN)
    kept_PM = selection.take(rewards_PN)
    if isinstance(selection, BatchSelection):
        kept_PM = selection.by_prompt(kept_PM)
    # Mean and deviation are those of the reference: `[P, M]` or `[P, N]`.
    reference_PR = kept_PM if when == "after" else rewards_PN

    if baseline == "leave_one_out":
        centred_PM = _subtract_others(kept_PM, reference_PR)
    else:
        centred_PM = kept_PM - reference_PR.nanmean(dim=1, keepdim=True)

    if scale == "none":
        scaled_PM = centred_PM
    elif baseline == "leave_one_out":
        all_1R = _subtract_others(reference_PR, reference_PR).reshape(1, -1)
        scaled_PM = (centred_PM - all_1R.nanmean()) / (_nan_std(all_1R) + epsilon)
    else:
        groups_PR = reference_PR if scale == "group" else reference_PR.reshape(1, -1)
        scaled_PM = centred_PM / (_nan_std(groups_PR) + epsilon)
    # Rounding of a constant group's mean must not become an advantage.
    constant_P1 = is_constant(reference_PR, tolerance).unsqueeze(1)
    advantages_PM = scaled_PM.nan_to_num(nan=0.0).masked_fill(constant_P1, 0.0)
    if isinstance(selection, BatchSelection):
        return advantages_PM[selection.groups, selection.slots]
    return advantages_PM


def spread(rewards_PN: Tensor) -> Tensor:
    """Return the standard deviation (ddof = 1) of each group's scored rewards, `[P]`; 0 with fewer than two."""
    rewards_PN, _ = checked_rewards(rewards_PN)
    return _nan_std(rewards_PN).squeeze(1).nan_to_num(nan=0.0)


def is_constant(rewards_PN: Tensor, tolerance: float = 0.0) -> Tensor:
    """Return whether each group's scored rewards are all equal up to rounding, bool `[P]`; true if none is scored.

    The highest and the lowest reward count as equal if they differ by at most `tolerance`, plus 5e-7 of the larger
    magnitude of the two (`CONSTANT_TOLERANCE`), plus 1e-12. It is decided in float64, whatever the dtype. Trainers,
    dynamic sampling, advantages and metrics use this function to decide whether a group has a signal.

    Args:
        rewards_PN: `[P, N]`, finite or NaN.
        tolerance: in units of reward, at least 0. It is absolute, because a difference that does not matter, such as
            one of 0.01 in a length penalty, does not grow with the rewards. The other part is relative, as rounding is.

    Raises:
        TypeError, ValueError: as `select`; a tolerance that is not a finite number of at least 0.

    >>> is_constant(torch.tensor([[0.3, 0.4], [0.3, 0.41]]), tolerance=0.1)
    tensor([ True, False])
    >>> is_constant(torch.tensor([[0.1 + 0.2 + 0.05, 0.05 + 0.2 + 0.1], [0.35, 0.36]], dtype=torch.float64))
    tensor([ True, False])
    """
    check_not_negative("tolerance", tolerance)
    rewards_PN = checked_rewards(rewards_PN)[0].double()
    unscored_PN = rewards_PN.isnan()
    high_P = rewards_PN.masked_fill(unscored_PN, -math.inf).amax(dim=1)
    low_P = rewards_PN.masked_fill(unscored_PN, math.inf).amin(dim=1)
    magnitude_P = torch.maximum(high_P.abs(), low_P.abs())
    return high_P - low_P <= tolerance + CONSTANT_TOLERANCE * magnitude_P + CONSTANT_FLOOR


def pods_objective(
    logps_PMT: Tensor,
    old_logps_PMT: Tensor,
    advantages_PM: Tensor,
    mask_PMT: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """Return the clipped loss of the kept rollouts: mean over a completion's tokens, then over completions.

    Source: PODS (arXiv 2504.13818), section 3.2, L_PODS with its sign reversed, to be minimised; the KL
    term is GRPO's (arXiv 2402.03300, equation 4): exp(ref - logp) - (ref - logp) - 1 per token.

    Args:
        logps_PMT: `[P, M, T]`, or `[R, T]` for the rows of a batch: log-probability (nats) of each completion token
            under the policy in training.
        old_logps_PMT: of the same shape, under the policy that generated them; held constant.
        advantages_PM: `[P, M]` or `[R]`, held constant.
        mask_PMT: of the shape of `logps_PMT`, true or 1 on completion tokens; values elsewhere are ignored.
        epsilon_low: the ratio is clipped at 1 - epsilon_low; at least 0.
        epsilon_high: and at 1 + epsilon_high, at least 0; None takes epsilon_low.
        beta: weight of the KL term against the reference policy, at least 0; the paper's default is 0.
        ref_logps: of the shape of `logps_PMT`, under the reference policy, held constant; required unless beta is 0.

    Returns:
        A scalar to minimise, in the dtype of `logps_PMT`. A completion without tokens counts as 0.

    Raises:
        TypeError: an argument that is not a dense tensor with values, or not a number; log-probabilities that are not
            floating point; advantages that are not real numbers.
        ValueError: shapes or devices that do not fit, no completions (a mean of none is NaN), advantages that are NaN
            or infinite, a mask with other values than 0 and 1, a negative number, or beta without `ref_logps`.

    >>> logps = torch.zeros(1, 2, 3)
    >>> pods_objective(logps, logps, torch.tensor([[1.0, -0.5]]), torch.ones(1, 2, 3))
    tensor(-0.2500)
    >>> pods_objective(logps[0], logps[0], torch.tensor([1.0, -0.5]), torch.ones(2, 3))
    tensor(-0.2500)
    """
    check_not_negative("epsilon_low", epsilon_low)
    if epsilon_high is not None:
        check_not_negative("epsilon_high", epsilon_high)
    check_not_negative("beta", beta)
    if beta != 0.0 and ref_logps is None:
        raise ValueError(f"beta = {beta} needs ref_logps, the reference policy's log-probabilities; got None.")
    _check_inputs(logps_PMT, old_logps_PMT, advantages_PM, mask_PMT, ref_logps)
    outside_PMT = ~mask_PMT.bool()
    # Filled before exp: an infinity under the mask would otherwise reach the gradient as NaN.
    ratio_PMT = (logps_PMT - old_logps_PMT.detach()).masked_fill(outside_PMT, 0.0).exp()
    if epsilon_high is None:
        epsilon_high = epsilon_low
    advantages_PM1 = advantages_PM.detach().unsqueeze(-1)
    clipped_PMT = ratio_PMT.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss_PMT = -torch.minimum(ratio_PMT * advantages_PM1, clipped_PMT * advantages_PM1)
    if beta != 0.0 and ref_logps is not None:
        log_ratio_PMT = (ref_logps.detach() - logps_PMT).masked_fill(outside_PMT, 0.0)
        loss_PMT = loss_PMT + beta * (log_ratio_PMT.exp() - log_ratio_PMT - 1)
    tokens_PM = (~outside_PMT).sum(dim=-1).clamp(min=1)
    loss_PM = loss_PMT.masked_fill(outside_PMT, 0.0).sum(dim=-1) / tokens_PM
    return loss_PM.mean()


def _subtract_others(values_PM: Tensor, group_PR: Tensor) -> Tensor:
    """Subtract from each value the mean of its group's other numbers; NaN where there are none."""
    others_P1 = (~group_PR.isnan()).sum(dim=1, keepdim=True) - 1
    sum_of_others_PM = group_PR.nansum(dim=1, keepdim=True) - values_PM
    return values_PM - sum_of_others_PM / others_P1


def _nan_std(values_PR: Tensor) -> Tensor:
    """Return the standard deviation (ddof = 1) of each row without its NaNs, `[P, 1]`; NaN for fewer than two."""
    mean_P1 = values_PR.nanmean(dim=1, keepdim=True)
    count_P1 = (~values_PR.isnan()).sum(dim=1, keepdim=True, dtype=values_PR.dtype)
    variance_P1 = (values_PR - mean_P1).square().nanmean(dim=1, keepdim=True)
    return (variance_P1 * (count_P1 / (count_P1 - 1))).sqrt()


def _check_inputs(
    logps_PMT: Tensor, old_logps: Tensor, advantages_PM: Tensor, mask: Tensor, ref_logps: Tensor | None
) -> None:
    """Raise unless the arguments of `pods_objective` fit each other."""
    per_token = {"logps": logps_PMT, "old_logps": old_logps, "mask": mask}
    if ref_logps is not None:
        per_token["ref_logps"] = ref_logps
    for name, value in {**per_token, "advantages": advantages_PM}.items():
        check_tensor(name, value)
        check_device(name, value, "logps", logps_PMT)
    _check_dtypes(per_token, advantages_PM)
    if logps_PMT.ndim not in (2, 3):
        raise ValueError(f"logps must have shape [P, M, T] or [R, T]; got {kind_of(logps_PMT)}.")
    if 0 in logps_PMT.shape[:-1]:
        raise ValueError(
            f"logps must hold at least one completion; got {kind_of(logps_PMT)}, whose mean would be NaN. Skip the "
            "update of a batch without completions."
        )
    for name, value in per_token.items():
        if value.shape != logps_PMT.shape:
            raise ValueError(f"{name} must have the shape of logps, {list(logps_PMT.shape)}; got {kind_of(value)}.")
    if advantages_PM.shape != logps_PMT.shape[:-1]:
        raise ValueError(
            f"advantages must have the shape of logps without T, {list(logps_PMT.shape[:-1])}; got "
            f"{kind_of(advantages_PM)}."
        )
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask must be true or 1 on completion tokens and false or 0 elsewhere; it has other values.")
    unusable = (~advantages_PM.isfinite()).nonzero().tolist()
    if unusable:
        place = "prompt {}, row {}" if advantages_PM.ndim == 2 else "row {}"
        raise ValueError(
            f"{len(unusable)} of {advantages_PM.numel()} advantages are NaN or infinite, the first at "
            f"{place.format(*unusable[0])}. Give a rollout that cannot be scored advantage 0, as `advantages` does."
        )


def _check_dtypes(per_token: Mapping[str, Tensor], advantages_PM: Tensor) -> None:
    for name, value in per_token.items():
        if name != "mask" and not value.is_floating_point():
            raise TypeError(f"{name} must be log-probabilities in floating point; got {kind_of(value)}.")
    for name, value in {"mask": per_token["mask"], "advantages": advantages_PM}.items():
        if value.is_complex():
            raise TypeError(f"{name} must be real numbers; got {kind_of(value)}.")
    if advantages_PM.dtype == torch.bool:
        raise TypeError(f"advantages must be real numbers; got {kind_of(advantages_PM)}.")
