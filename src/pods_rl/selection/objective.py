"""The PODS loss as the paper writes it: a reference to compare engines with."""

from __future__ import annotations

import torch
from torch import Tensor

from .validation import describe


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
    """The clipped loss of the kept rollouts: mean over each completion's tokens, then over all completions.

    Source: PODS (arXiv 2504.13818), section 3.2, L_PODS, its sign turned so that it is minimised; the KL
    term is GRPO's (arXiv 2402.03300, equation 4): exp(ref - logp) - (ref - logp) - 1 per token.

    Args:
        logps_PMT: `[P, M, T]`, log-probability (nats) of each completion token under the policy in training.
        old_logps_PMT: `[P, M, T]`, under the policy that generated them; held constant.
        advantages_PM: `[P, M]`, held constant.
        mask_PMT: `[P, M, T]`, true or 1 on completion tokens; whatever the others hold is ignored.
        epsilon_low: the ratio is clipped at 1 - epsilon_low.
        epsilon_high: and at 1 + epsilon_high; None takes epsilon_low.
        beta: weight of the KL term against the reference policy; the paper's default is 0.
        ref_logps: `[P, M, T]`, under the reference policy, held constant; needed if beta is not 0.

    Returns:
        A scalar to minimise, in the dtype of `logps_PMT`. A completion without tokens counts as 0.

    Raises:
        ValueError: shapes that do not fit, or beta without `ref_logps`.

    >>> logps = torch.zeros(1, 2, 3)
    >>> pods_objective(logps, logps, torch.tensor([[1.0, -0.5]]), torch.ones(1, 2, 3))
    tensor(-0.2500)
    """
    if beta != 0.0 and ref_logps is None:
        raise ValueError(f"beta = {beta} needs ref_logps, the reference policy's log-probabilities; got None.")
    _check_shapes(logps_PMT, old_logps_PMT, advantages_PM, mask_PMT, ref_logps)
    outside_PMT = ~mask_PMT.bool()
    # Filled before exp: an infinity under the mask would otherwise reach the gradient as NaN.
    ratio_PMT = (logps_PMT - old_logps_PMT.detach()).masked_fill(outside_PMT, 0.0).exp()
    high = epsilon_low if epsilon_high is None else epsilon_high
    advantages_PM1 = advantages_PM.detach().unsqueeze(-1)
    clipped_PMT = ratio_PMT.clamp(1 - epsilon_low, 1 + high)
    loss_PMT = -torch.minimum(ratio_PMT * advantages_PM1, clipped_PMT * advantages_PM1)
    if beta != 0.0 and ref_logps is not None:
        log_ratio_PMT = (ref_logps.detach() - logps_PMT).masked_fill(outside_PMT, 0.0)
        loss_PMT = loss_PMT + beta * (log_ratio_PMT.exp() - log_ratio_PMT - 1)
    tokens_PM = (~outside_PMT).sum(dim=-1).clamp(min=1)
    return (loss_PMT.masked_fill(outside_PMT, 0.0).sum(dim=-1) / tokens_PM).mean()


def _check_shapes(
    logps_PMT: Tensor, old_logps: Tensor, advantages_PM: Tensor, mask: Tensor, ref_logps: Tensor | None
) -> None:
    if logps_PMT.ndim != 3:
        raise ValueError(f"logps must have shape [P, M, T]; got {describe(logps_PMT)}.")
    wanted = {"old_logps": old_logps, "mask": mask, "ref_logps": ref_logps}
    for name, value in wanted.items():
        if value is not None and value.shape != logps_PMT.shape:
            raise ValueError(f"{name} must have the shape of logps, {list(logps_PMT.shape)}; got {describe(value)}.")
    if advantages_PM.shape != logps_PMT.shape[:2]:
        raise ValueError(
            f"advantages must have shape [P, M] = {list(logps_PMT.shape[:2])}; got {describe(advantages_PM)}."
        )
