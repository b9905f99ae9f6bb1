"""Out of memory, said so that it can be mended: where, what was reckoned, and the settings that would lower it.

What is overridden of TRL: `train`, around everything that a step does.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from trl import GRPOTrainer

from ...errors import UserError
from ...planning.batching import check_batch
from ...planning.memory import GENERATION, UPDATE, Shape, advice, estimate
from .config import PODSConfig
from .phases import PhaseClock

_GIB = 2**30
# what torch says where it raises a plain RuntimeError
_SAID = ("not enough memory", "can't allocate memory", "error: out of memory")
_PLACES = {"rollout": GENERATION, "update": UPDATE}


class MemoryGuardMixin(GRPOTrainer):
    """Turns an error about memory into one that says what to do; any other passes as it is."""

    args: PODSConfig
    clock: PhaseClock

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
            raise UserError(self._out_of_memory(error)) from error

    def _out_of_memory(self, error: BaseException) -> str:
        phase = self.clock.phase
        step = self.state.global_step + 1
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if phase not in _PLACES:
            where = f"in {phase} of step {step}" if phase else f"between steps, after step {step - 1}"
            return f"Out of memory {where} ({what}). In an evaluation, lower eval_batch_size."
        place = _PLACES[phase]
        said = f"Out of memory in {place} of step {step} ({what})."
        try:
            return f"{said} {self._reckoned(place)}"
        except UserError as none:  # a policy of a kind that cannot be reckoned
            return f"{said} {none} Lower rollout_batch_size or per_device_train_batch_size."

    def _reckoned(self, place: str) -> str:
        """The estimate of a phase, its largest parts, and what would lower it."""
        values, cpu = self._settings(), self.accelerator.device.type == "cpu"
        plan = check_batch(
            num_generations=self.args.num_generations,
            num_rollouts=self.args.num_rollouts,
            per_device_train_batch_size=self.args.per_device_train_batch_size,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            steps_per_generation=self.args.steps_per_generation,
            rollout_batch_size=self.args.rollout_batch_size,
            processes=self.accelerator.num_processes,
        )
        shape = Shape.of(self.accelerator.unwrap_model(self.model).config.to_dict())
        bf16 = bool(self.args.bf16 or self.args.fp16)
        expected = estimate(values, shape, plan, bf16=bf16, on_cpu=cpu)
        largest = sorted(expected.parts, key=lambda part: -getattr(part, place))[:3]
        parts = ", ".join(f"{part.name} {getattr(part, place) / _GIB:.2f}" for part in largest)
        changes = advice(values, shape, plan, place, bf16=bf16, on_cpu=cpu)
        less = ", or ".join(f"{change.settings} ({change.left / _GIB:.2f} GiB)" for change in changes)
        return (
            f"Estimated for a process, prompts of {expected.prompt} tokens: {expected.total(place) / _GIB:.2f} GiB in "
            f"{place} ({parts}). " + (f"What lowers it most: {less}." if less else "Take a smaller policy.")
        )

    def _settings(self) -> dict[str, Any]:
        """The run's settings under the names of a recipe."""
        model = self.accelerator.unwrap_model(self.model)
        values = dict(vars(self.args)) | {
            "optim": str(getattr(self.args.optim, "value", self.args.optim)),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False)),
            "load_in_8bit": bool(getattr(model, "is_loaded_in_8bit", False)),
            "use_peft": isinstance(model, PeftModel),
            "max_prompt_length": self._longest_prompt(),
        }
        if isinstance(model, PeftModel):
            adapter: Any = next(iter(model.peft_config.values()))
            values |= {"lora_r": adapter.r, "lora_target_modules": adapter.target_modules}
        return values

    def _longest_prompt(self) -> int | None:
        """Tokens of the longest of the first prompts; None where the data cannot be looked into."""
        try:
            prompts = self.train_dataset[:64]["prompt"]
            return max(map(len, self._tokenize_prompts(prompts)[0]))
        except Exception:  # a stream, or a tokenizer that has no memory left either: the estimate takes its default
            return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory; torch has one class for GPUs and a sentence for CPUs.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID)
