"""Skip updates that are not finite, and turn out-of-memory errors into advice."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl

from ....errors import UserError
from ..compat import TRLTrainer

logger = logging.getLogger(__name__)

MAX_BAD_STEPS = 3  # bad steps in a row: one may be due to its batch, three are due to the policy
_CANNOT_SAMPLE = "probability tensor contains"  # how torch.multinomial begins its message about inf and NaN
_NO_MEMORY = ("not enough memory", "can't allocate memory", "error: out of memory")  # in torch's plain RuntimeErrors
_LESS_MEMORY = {  # by phase: what runs in it, and what lowers its memory
    "rollout": ("generation", "Lower rollout_batch_size, max_completion_length or num_rollouts."),
    "update": (
        "the update",
        "Set max_tokens_per_microbatch: auto or gradient_checkpointing: true, lower per_device_train_batch_size and "
        "raise gradient_accumulation_steps by the same factor, lower max_completion_length, or train an adapter "
        "(use_peft: true).",
    ),
}
_OTHERS = ("a reward or an evaluation", "In an evaluation, lower eval_batch_size.")


class UnstableTrainingError(UserError):
    """The run ended because its losses, gradients or probabilities are not finite. The message gives advice."""


class Stability(TrainerCallback):
    """Skip the update of a step whose loss or gradient is not finite, and end a training with too many of them.

    A good step equals TRL's bit for bit.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self.reset()

    def reset(self) -> None:
        """Forget every step; called when a training begins."""
        self.bad_steps: list[tuple[int, float, float]] = []  # those in a row: step, loss, norm of the gradient
        self.step_loss: Tensor | None = None  # sum over the step's micro-batches, on its device
        self.gradient_norm: Any = 0.0
        self._bad_losses: list[float] = []  # since the last line of the log
        self._warned = False

    def take_loss(self, loss: Tensor) -> Tensor:
        """Add a micro-batch's loss, and return a finite value: a NaN would stay in transformers' running sum."""
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss
        return loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Clear the gradients of a bad step on all processes."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        if self.step_loss is None:  # a subclass's `training_step` that does not call ours: only its gradient is known
            self.step_loss = torch.zeros((), device=accelerator.device)
        loss = accelerator.gather(self.step_loss.detach().float().reshape(1)).mean().item()
        local_norm = self.gradient_norm
        # With sharded weights it is gathered, to be equal on every process.
        norm = local_norm.full_tensor() if hasattr(local_norm, "full_tensor") else local_norm
        gradient = 0.0 if norm is None else float(norm)  # DeepSpeed may return none: its own overflow check decides
        self.step_loss = None
        loss_is_finite = math.isfinite(loss)
        gradient_is_finite = math.isfinite(gradient)
        metrics = trainer._metrics["train"]
        metrics["pods/bad_loss"].append(float(not loss_is_finite))
        metrics["pods/bad_gradient"].append(float(not gradient_is_finite))
        if not loss_is_finite:
            self._bad_losses.append(loss)
        elif accelerator.scaler is not None and not gradient_is_finite:
            return  # with fp16 this tunes the loss scale, and the scaler skips such steps itself
        if loss_is_finite and gradient_is_finite:
            self.bad_steps = []
            return
        step = trainer.state.global_step + 1
        self.bad_steps.append((step, loss, gradient))
        trainer.model_wrapped.zero_grad(set_to_none=True)
        if not self._warned and accelerator.is_main_process:
            self._warned = True
            logger.warning(
                "step %d: loss %g, gradient norm %g: its update is skipped; %d such steps in a row end the run. Logged "
                "once; see pods/bad_loss and pods/bad_gradient.",
                step, loss, gradient, MAX_BAD_STEPS,
            )  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """If too many steps were bad, save the weights, which are the last good ones, and stop."""
        if len(self.bad_steps) >= MAX_BAD_STEPS:
            control.should_save = True
            control.should_training_stop = True

    def raise_if_unstable(self) -> None:
        """After the training: raise if too many steps were bad."""
        if len(self.bad_steps) < MAX_BAD_STEPS:
            return
        steps = [step for step, _, _ in self.bad_steps]
        last, loss, gradient = self.bad_steps[-1]
        not_finite = "gradient" if math.isfinite(loss) else "loss"
        raise UnstableTrainingError(
            f"the {not_finite} was not finite in {len(steps)} steps in a row "
            f"({', '.join(map(str, steps))}; last: loss {loss:g}, gradient norm {gradient:g}). Their updates were "
            f"skipped: checkpoint-{last} holds the last good weights, those of step {steps[0] - 1}. Try a lower "
            f"learning_rate (now {self._trainer.args.learning_rate:g}), bf16: false, or an earlier checkpoint, and "
            "look at the last rollouts"
        )

    def restore_loss(self, logs: dict[str, float]) -> None:
        """Log the original loss if `take_loss` made it finite."""
        if "loss" in logs and self._bad_losses:
            logs["loss"] = self._bad_losses[-1]
            self._bad_losses.clear()

    @contextmanager
    def explaining_sampling(self) -> Iterator[None]:
        """Raise UnstableTrainingError if the policy's probabilities are not finite."""
        try:
            yield
        except RuntimeError as error:
            if _CANNOT_SAMPLE not in str(error):
                raise
            raise UnstableTrainingError(
                f"after step {self._trainer.state.global_step} the policy cannot generate: its probabilities are not "
                "finite. Go back to an earlier checkpoint, or to another model if this one failed before its first "
                f"step, and try a lower learning_rate (now {self._trainer.args.learning_rate:g})"
            ) from error

    @contextmanager
    def explaining_memory(self, phase: Callable[[], str | None]) -> Iterator[None]:
        """Raise UserError with advice if memory runs out; `phase` is the clock's, None between steps."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            activity, advice = _LESS_MEMORY.get(phase() or "", _OTHERS)
            step = self._trainer.state.global_step + 1
            raise UserError(f"Out of memory in {activity} of step {step} ({reason}). {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is about memory; torch has a class for GPUs and only a message for CPUs.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(words in message for words in _NO_MEMORY)
