"""Guarded: TRL's GRPOTrainer with rewards that are checked, tools with limits, skipped bad steps and exact resume.

A layer of PODSTrainer, and its outermost one: what it lets through is what TRL and the layers below it see.
"""

from __future__ import annotations

import warnings
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ....errors import UserError
from ....text import change_text, utf8_text
from .. import compat, sharding
from ..compat import COUNTERS, Batch, Completions, Layer
from ..config import check_prompts
from .checkpoints import ExactResume, load_renamed
from .rewards import CheckedRewards
from .stability import Stability
from .tools import Tools, check_completions


class Guarded(Layer):
    """GRPO as TRL's `GRPOTrainer` trains it, protected from what ends or spoils a run.

    Takes the arguments of TRL's trainer, with `args` a `PODSConfig`, of which it reads `reward_errors` and
    `tool_timeout`. Usable rewards and finite steps equal TRL's bit for bit.

    Raises:
        UserError: versions of TRL or transformers whose methods take other arguments; in training, memory that runs
            out.
    """

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *others: Any, **named: Any) -> None:
        compat.check_overrides(Guarded)
        super().__init__(model, reward_funcs, args, *others, **named)  # type: ignore[call-arg]
        is_cast = self.use_transformers_continuous_batching and (self.args.bf16 or self.args.fp16)
        if is_cast and torch.float32 in {weight.dtype for weight in self.model.parameters() if weight.requires_grad}:
            key = "bf16" if self.args.bf16 else "fp16"
            dtype = "bfloat16" if self.args.bf16 else "float16"
            warnings.warn(
                f"use_transformers_continuous_batching with {key} = true: before each generation TRL turns the trained "
                f"float32 weights into {dtype}, permanently, and small updates are then rounded away. Set {key}: "
                f"false, or load the policy in {dtype} on purpose (dtype: {dtype}).",
                UserWarning,
                stacklevel=2,
            )
        self._rewards = CheckedRewards(self)
        self._stability = Stability(self)
        self._tools = Tools(self)
        self._resume = ExactResume(self)
        self.add_callback(self._stability)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        # Here, since the constructors of transformers and TRL prepare models next.
        super().create_accelerator_and_postprocess()
        sharding.use_fsdp2(self)

    # -- generation and rewards ----------------------------------------------------------------------------------------

    @override
    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        # Replaced, since a subclass's `_calculate_rewards` need not call ours.
        score = partial(self._rewards.score, self._calculate_rewards)
        with compat.replacing(self, _calculate_rewards=score), self._tools.reading_anything():
            return super()._generate_and_score_completions(inputs)

    @override
    def _calculate_rewards(
        self, inputs: list[Batch], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        with self._rewards.watching():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards.clean(rewards)

    @override
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self._tools.limit()
        return super()._generate(prompts)

    @override
    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **named: Any) -> Completions:
        with self._stability.explaining_sampling():
            completions = super()._generate_single_turn(prompt_ids, *others, **named)
        check_completions(len(prompt_ids), completions[0])
        return completions

    # -- steps that are not finite -------------------------------------------------------------------------------------

    @override
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        # Read the loss before transformers' filter turns NaN into 0.
        return self._stability.take_loss(super().training_step(model, inputs, num_items_in_batch))

    @override
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Only here is the norm of every step known.
        self._stability.gradient_norm = super()._get_grad_norm(model, grad_norm)
        return self._stability.gradient_norm

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Log the original loss and no zero counters. TRL prints model output to the terminal, and saves it.
        self._stability.restore_loss(logs)
        for mode in ("train", "eval"):
            metrics = self._metrics[mode]
            for name in COUNTERS:
                if name in metrics and not any(metrics[name]):
                    del metrics[name]
        if self.log_completions:
            # Escape characters that the Parquet file of the table cannot hold.
            for column in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
                storable = [change_text(entry, utf8_text) for entry in column]
                column.clear()
                column.extend(storable)
        with compat.printing_escaped():
            super().log(logs, start_time)

    # -- resume (checkpoints.py) ---------------------------------------------------------------------------------------

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; resume exactly from a checkpoint of this trainer, and as TRL does from one of TRL's.

        On a CPU the resumed run is the same bit for bit. On a GPU it can differ by rounding, as any two runs do there.

        Args:
            resume_from_checkpoint: a folder that this trainer or TRL's saved. If True, the newest complete one in
                `output_dir`.
            args: as TRL's, like `kwargs`.

        Raises:
            UserError: the checkpoint is incomplete, missing or of another number of processes; there are fewer prompts
                than one generation needs; memory ran out.
            UnstableTrainingError: three steps in a row had a loss or gradient that is not finite.
        """
        if isinstance(self.train_dataset, Sized):  # a stream has no length
            check_prompts(self.args, len(self.train_dataset))
        self._stability.reset()
        checkpoint = self._resume.find(resume_from_checkpoint)
        explaining_memory = self._stability.explaining_memory(self._running_phase)
        try:
            with explaining_memory, self._tools.closing():
                output = super().train(checkpoint, *args, **kwargs)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "on_train_error"):  # of RunDirectory
                    callback.on_train_error(error, self.state)
            from ....runs.files import write_failure

            full = write_failure(error)  # of a disk
            if full is None or isinstance(error, UserError):
                raise
            raise UserError(
                f"Cannot write to {getattr(error, 'filename', None) or self.args.output_dir}: {full}. Free some space, "
                "then continue from the last checkpoint with resume_from_checkpoint=True."
            ) from error
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            load_renamed(self, self.state.best_model_checkpoint)
        self._stability.raise_if_unstable()
        return output

    @override
    def _run_epoch(self, **kwargs: Any) -> None:  # transformers calls it by keyword
        if not self._resume.begins_finished(kwargs["epoch"], kwargs["epochs_trained"], kwargs["train_dataloader"]):
            super()._run_epoch(**kwargs)

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        # Save each process's state together with its random state.
        super()._save_rng_state(output_dir)
        self._resume.save(Path(output_dir))

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self._resume.load(Path(checkpoint))

    layout = property(sharding.layout)
    whole_weights = sharding.whole_weights
