"""The update of PODSTrainer: micro-batches without padding, and none of a step that has no signal.

What is overridden of TRL, in the order in which an optimizer step meets it:

- `_prepare_inputs`: after TRL split a generation into micro-batches, regroup them by length and see which carry signal.
- `compute_loss`: skip the passes of a step without any signal; count the tokens trained.
- `_get_per_token_logps_and_entropies`: compute no padding.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from .config import PODSConfig
from .layout import MicroBatch, completion_lengths, sort_windows, steps_window, trimmed_passes, trimmed_sides


class UpdateMixin(GRPOTrainer):
    """What PODSTrainer changes of TRL's update; the gradient stays TRL's, up to rounding."""

    args: PODSConfig
    step_tokens: dict[str, int]
    step_has_signal: bool
    _buffered_inputs: list[MicroBatch] | None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._buffered_inputs is None or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = self._arrange(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _arrange(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        window = steps_window(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        if self.args.sort_by_length and window and window > 1 and self._loss_ignores_layout():
            micro_batches = sort_windows(micro_batches, window)
        local = torch.stack([self._teaches(batch) for batch in micro_batches])
        signal = self.accelerator.gather(local.unsqueeze(0)).any(dim=0).tolist()
        whole = window == self.args.gradient_accumulation_steps  # no other generation feeds the same step
        for i, batch in enumerate(micro_batches):
            batch["has_signal"] = signal[i]
            batch["skip"] = False
            if whole and window is not None and self.args.skip_zero_advantage_steps:
                start = i - i % window
                batch["skip"] = not any(signal[start : start + window])
        return micro_batches

    def _teaches(self, batch: MicroBatch) -> Tensor:
        """Whether a micro-batch has a gradient: a row with an advantage and a token, or a term that needs none."""
        if self.beta != 0.0 or self.aux_loss_enabled or self._entropy_bonus_enabled:
            return torch.ones((), dtype=torch.bool, device=batch["advantages"].device)
        return ((batch["advantages"] != 0) & (completion_lengths(batch) > 0)).any()

    def _loss_ignores_layout(self) -> bool:
        # These terms are computed per micro-batch, so which rows share one would change the gradient.
        per_micro_batch = self.loss_type == "bnpo" or self.top_entropy_quantile < 1.0
        return not (per_micro_batch or self.aux_loss_enabled or self._entropy_bonus_enabled)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self.step_has_signal |= inputs["has_signal"]
        if inputs["skip"]:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self.step_tokens["trained"] += int(completion_lengths(inputs).sum())
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        compute = super()._get_per_token_logps_and_entropies
        if not self.args.trim_padding or self._trimmed_sides == "none" or not self.model.training:
            return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        return trimmed_passes(
            lambda ids, mask, keep: compute(model, ids, mask, keep, **kwargs),
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size or len(input_ids),
            multiple_of=self.pad_to_multiple_of,
            left=self._trimmed_sides == "both",
        )

    @cached_property
    def _trimmed_sides(self) -> str:
        return trimmed_sides(self.accelerator.unwrap_model(self.model).config.get_text_config())
