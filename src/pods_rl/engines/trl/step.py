"""What happens around an optimizer step: the clock, the skip, the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ...distributed import mark

if TYPE_CHECKING:
    from .trainer import PODSTrainer


class StepCallback(TrainerCallback):
    """Times one optimizer step by phase, and turns a step without signal, or a bad one, into none at all.

    A step whose advantages are all zero has a zero policy gradient, but AdamW's momentum and weight decay would move
    the weights all the same. Without gradients the optimizer passes every parameter by.
    """

    def __init__(self, trainer: PODSTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        mark("update", step=state.global_step + 1)
        trainer.clock.reset()
        trainer.clock.enter("update")
        trainer.step_tokens = {"generated": 0, "trained": 0}
        trainer.step_has_signal = False

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer.leave_out_bad_step()
        skipped = bool(trainer.args.skip_zero_advantage_steps) and not trainer.step_has_signal
        if skipped:
            trainer.model_wrapped.zero_grad(set_to_none=True)
        trainer._metrics["train"]["pods/skipped_step"].append(float(skipped))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer.stop_if_unstable(control)
        skipped = trainer._metrics["train"]["pods/skipped_step"][-1]
        if skipped and trainer.use_vllm and trainer._last_loaded_step == state.global_step - 1:
            trainer._last_loaded_step = state.global_step  # the generator has these weights: nothing moved
        trainer.clock.stop()
        metrics = trainer._metrics["train"]
        for phase, seconds in trainer.clock.seconds.items():
            metrics[f"pods/seconds/{phase}"].append(seconds)
        tokens = torch.tensor(list(trainer.step_tokens.values()), device=trainer.accelerator.device)
        totals = trainer.accelerator.reduce(tokens, reduction="sum").tolist()
        for name, total in zip(trainer.step_tokens, totals, strict=True):
            metrics[f"pods/tokens/{name}"].append(float(total))
