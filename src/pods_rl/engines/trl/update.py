"""One optimizer step: its micro-batches, seconds and tokens, and whether it updates the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...distributed import mark
from .compat import Batch, TRLTrainer
from .guard import Guard
from .packing import Passes, completion_lengths, sort_windows, steps_window, trimmed_passes, trimmed_sides

PHASES = ("rollout", "reward", "selection", "update")


class PhaseClock:
    """Seconds per phase of one step; exactly one phase runs at a time, so the phases sum to the step.

    Accelerators run asynchronously, so each switch waits for the device, four times a step.

    Example:
        >>> now = iter([0.0, 1.0, 3.0])
        >>> clock = PhaseClock(device=None, now=lambda: next(now))
        >>> clock.enter("rollout"); clock.enter("update"); clock.stop()
        >>> clock.seconds["rollout"], clock.seconds["update"]
        (1.0, 2.0)
    """

    def __init__(self, device: torch.device | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now = now
        self._since = 0.0
        self.phase: str | None = None  # the running one
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def enter(self, phase: str) -> None:
        """Close the running phase and start `phase`."""
        now = self._settle()
        mark(phase)
        self.phase, self._since = phase, now

    def stop(self) -> None:
        """Close the running phase, if any."""
        if self.phase is not None:
            self._settle()
            self.phase = None

    def reset(self) -> None:
        """Reset the seconds of the last step."""
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def _settle(self) -> float:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._now()
        if self.phase is not None:
            self.seconds[self.phase] += now - self._since
        return now


class Update:
    """Micro-batches sorted and trimmed, passes without a gradient skipped; the gradient stays TRL's up to rounding."""

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self.clock = PhaseClock(trainer.accelerator.device)
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the last step's tokens and signal."""
        self.tokens = {"generated": 0, "trained": 0}
        self.has_signal = False

    def arrange(self, micro_batches: list[Batch]) -> list[Batch]:
        """Sort a generation's rows by length within each optimizer step, and mark the steps without a gradient."""
        args = self._trainer.args
        window = steps_window(args.steps_per_generation, args.gradient_accumulation_steps)
        if args.sort_by_length and window and window > 1 and not self._loss_depends_on_micro_batch():
            micro_batches = sort_windows(micro_batches, window)
        local = torch.stack([self._has_gradient(batch) for batch in micro_batches])
        signal = self._trainer.accelerator.gather(local.unsqueeze(0)).any(dim=0).tolist()
        whole = window == args.gradient_accumulation_steps  # a step uses only one generation
        for i, batch in enumerate(micro_batches):
            batch["has_signal"] = signal[i]
            batch["skip"] = False
            if whole and window is not None and args.skip_zero_advantage_steps:
                start = i - i % window
                batch["skip"] = not any(signal[start : start + window])
        return micro_batches

    def _has_gradient(self, batch: Batch) -> Tensor:
        """Return whether a micro-batch has a row with an advantage and a token, or a loss term that needs none."""
        trainer = self._trainer
        if trainer.beta != 0.0 or trainer.aux_loss_enabled or trainer._entropy_bonus_enabled:
            return torch.ones((), dtype=torch.bool, device=batch["advantages"].device)
        return ((batch["advantages"] != 0) & (completion_lengths(batch) > 0)).any()

    def _loss_depends_on_micro_batch(self) -> bool:
        """Return whether a loss term is computed per micro-batch, so that sorting would change the gradient."""
        trainer = self._trainer
        per_micro_batch = trainer.loss_type == "bnpo" or trainer.top_entropy_quantile < 1.0
        return per_micro_batch or trainer.aux_loss_enabled or trainer._entropy_bonus_enabled

    def skips(self, batch: Batch) -> bool:
        """Return whether to skip the passes of a micro-batch; count its signal, and its tokens if they are run."""
        self.has_signal |= batch["has_signal"]
        if batch["skip"]:
            return True
        self.tokens["trained"] += int(completion_lengths(batch).sum())
        return False

    def passes(
        self, compute: Callable[..., Passes], ids: Tensor, mask: Tensor, keep: int, batch_size: int | None
    ) -> Passes:
        """Call TRL's `compute`; in training without padding, if trimming it changes only rounding."""
        trainer = self._trainer
        if not trainer.args.trim_padding or self._trimmed_sides == "none" or not trainer.model.training:
            return compute(ids, mask, keep, batch_size)
        return trimmed_passes(
            compute,
            ids,
            mask,
            keep,
            batch_size=batch_size or len(ids),
            multiple_of=trainer.pad_to_multiple_of,
            left=self._trimmed_sides == "both",
        )

    @cached_property
    def _trimmed_sides(self) -> str:
        trainer = self._trainer
        return trimmed_sides(trainer.accelerator.unwrap_model(trainer.model).config.get_text_config())


class StepCallback(TrainerCallback):
    """Time one optimizer step by phase, and clear the gradients of a step that has no signal or is bad.

    A step whose advantages are all zero has a zero policy gradient, but AdamW's momentum and weight decay would move
    the weights anyway. The optimizer skips parameters without gradients.
    """

    def __init__(self, trainer: TRLTrainer, update: Update, guard: Guard) -> None:
        self._trainer, self._update, self._guard = trainer, update, guard

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        mark("update", step=state.global_step + 1)
        self._update.clock.reset()
        self._update.clock.enter("update")
        self._update.begin_step()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        self._guard.skip_bad_step()
        skipped = bool(trainer.args.skip_zero_advantage_steps) and not self._update.has_signal
        if skipped:
            trainer.model_wrapped.zero_grad(set_to_none=True)
        trainer._metrics["train"]["pods/skipped_step"].append(float(skipped))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer, update, metrics = self._trainer, self._update, self._trainer._metrics["train"]
        self._guard.stop_if_unstable(control)
        skipped = metrics["pods/skipped_step"][-1]
        if skipped and trainer.use_vllm and trainer._last_loaded_step == state.global_step - 1:
            trainer._last_loaded_step = state.global_step  # the generator already has these weights
        update.clock.stop()
        for phase, seconds in update.clock.seconds.items():
            metrics[f"pods/seconds/{phase}"].append(seconds)
        tokens = torch.tensor(list(update.tokens.values()), device=trainer.accelerator.device)
        totals = trainer.accelerator.reduce(tokens, reduction="sum").tolist()
        for name, total in zip(update.tokens, totals, strict=True):
            metrics[f"pods/tokens/{name}"].append(float(total))
