"""Losses and gradients that are not finite: the update is left out, said as it was, and three in a row end the run.

What is overridden of TRL and transformers, in the order in which an optimizer step meets it:

- `_generate_single_turn`: say why a policy whose probabilities are not finite cannot generate.
- `training_step`: see each loss before transformers' filter turns NaN into 0.
- `_get_grad_norm`: see the norm that transformers takes of every step's gradient.
- `log`: log the loss as it was.
- `train`: end with UnstableTrainingError where the run was given up.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from ...errors import UserError

logger = logging.getLogger(__name__)

LIMIT = 3  # bad steps in a row: one is an accident of a batch, three are the policy
_CANNOT_SAMPLE = "probability tensor contains"  # begins what torch.multinomial says of inf and NaN


class UnstableTrainingError(UserError):
    """The run was given up: its losses, gradients or probabilities are not finite. The message says what to try."""


@dataclass
class BadSteps:
    """The steps in a row whose loss or gradient was not finite.

    >>> bad = BadSteps()
    >>> [bad.add(step, loss, 1.0) for step, loss in [(1, 0.5), (2, math.nan), (3, math.inf)]]
    [False, True, True]
    >>> bad.exhausted, bad.add(4, math.nan, math.nan), bad.exhausted
    (False, True, True)
    """

    row: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, norm of the gradient

    @property
    def exhausted(self) -> bool:
        return len(self.row) >= LIMIT

    def add(self, step: int, loss: float, gradient: float) -> bool:
        """Whether this step is bad; a good one ends the row."""
        bad = not (math.isfinite(loss) and math.isfinite(gradient))
        self.row = [*self.row, (step, loss, gradient)] if bad else []
        return bad

    def reason(self, learning_rate: float) -> str:
        """Why the run was given up, in words."""
        steps = ", ".join(str(step) for step, _, _ in self.row)
        _, loss, gradient = self.row[-1]
        what = "loss" if not math.isfinite(loss) else "gradient"
        return (
            f"the {what} was not finite in {len(self.row)} steps in a row ({steps}; last: loss {loss:g}, gradient "
            f"norm {gradient:g}). Their updates were left out: checkpoint-{self.row[-1][0]} holds the last good "
            f"weights, those of step {self.row[0][0] - 1}. Try a lower learning_rate (now {learning_rate:g}), "
            "bf16: false, or an earlier checkpoint, and look at the last rollouts"
        )


class GuardMixin(GRPOTrainer):
    """What PODSTrainer does about a bad step; a good one stays TRL's to the last bit."""

    def _watch_steps(self) -> None:
        """Forget every step; called when a training begins."""
        self._bad_steps = BadSteps()
        self._step_loss: Tensor | None = None  # sum over the step's micro-batches, on its device
        self._gradient_norm: Any = 0.0
        self._bad_losses: list[float] = []  # since the last line of the log
        self._said_bad = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._watch_steps()
        output = super().train(*args, **kwargs)
        if self._bad_steps.exhausted:
            raise UnstableTrainingError(self._bad_steps.reason(self.args.learning_rate))
        return output

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        # Once NaN, transformers' running sum would stay NaN: `log` puts the true loss in its place.
        return loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._gradient_norm = super()._get_grad_norm(model, grad_norm)
        return self._gradient_norm

    def leave_out_bad_step(self) -> bool:
        """Before the optimizer step: clear the gradients of a bad one, alike on all processes; whether it was bad."""
        assert self._step_loss is not None
        loss = self.accelerator.gather(self._step_loss.detach().float().reshape(1)).mean().item()
        gradient = _number(self._gradient_norm)
        self._step_loss = None
        metrics = self._metrics["train"]
        metrics["pods/bad_loss"].append(float(not math.isfinite(loss)))
        metrics["pods/bad_gradient"].append(float(not math.isfinite(gradient)))
        if not math.isfinite(loss):
            self._bad_losses.append(loss)
        elif self.accelerator.scaler is not None and not math.isfinite(gradient):
            return False  # in fp16 it is how the loss scale is found: the scaler skips such steps itself
        step = self.state.global_step + 1
        if not self._bad_steps.add(step, loss, gradient):
            return False
        self.model_wrapped.zero_grad(set_to_none=True)
        if not self._said_bad and self.accelerator.is_main_process:
            self._said_bad = True
            logger.warning(
                "step %d: loss %g, gradient norm %g: its update is left out; %d such steps in a row end the run. Said "
                "once; see pods/bad_loss and pods/bad_gradient.",
                step, loss, gradient, LIMIT,
            )  # fmt: skip
        return True

    def stop_if_unstable(self, control: Any) -> None:
        """After a step: where too many were bad, save the weights, which are the last good ones, and stop."""
        if self._bad_steps.exhausted:
            control.should_save = control.should_training_stop = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._bad_losses:
            logs["loss"] = self._bad_losses[-1]
            self._bad_losses.clear()
        super().log(logs, start_time)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate_single_turn(*args, **kwargs)
        except RuntimeError as error:
            if _CANNOT_SAMPLE not in str(error):
                raise
            finite = all(bool(torch.isfinite(p).all()) for p in self.model.parameters())
            which = "its weights are finite, but too large" if finite else "its weights are not finite"
            step = self.state.global_step
            raise UnstableTrainingError(
                f"after step {step} the policy cannot generate: its probabilities are not finite ({which}). "
                f"Go back to an earlier checkpoint, and try a lower learning_rate (now {self.args.learning_rate:g})"
                + ("" if step else ", or another model: this one was so before its first step")
            ) from error


def _number(norm: Any) -> float:
    """A gradient norm as a number; a sharded one is the same on every process only when whole."""
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return 0.0 if norm is None else float(norm)  # DeepSpeed may know none: its own overflow check decides
