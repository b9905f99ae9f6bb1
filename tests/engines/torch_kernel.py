"""TRL's log-probabilities in plain torch, for versions whose only kernel needs a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchKernel:
    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, chunk: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Log-probabilities, entropies, log sums of squared probabilities, mean logits and whether a token is best."""
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_probs = logits.log_softmax(-1)
        of_labels = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        optional = {
            "entropy": lambda: -(log_probs.exp() * log_probs).sum(-1),
            "log_sum_sq_probs": lambda: (2 * log_probs).logsumexp(-1),
            "mean_logits": lambda: logits.mean(-1),
            "is_top1": lambda: logits.argmax(-1) == labels,
        }
        return of_labels, *(compute() if name in outputs else None for name, compute in optional.items())
