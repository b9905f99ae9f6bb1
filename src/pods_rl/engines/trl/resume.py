"""Resume of PODSTrainer: a killed run goes on from its checkpoint as if nothing had happened, to the last bit.

TRL and transformers restore weights, optimizer, schedule and random state. What they lose is kept here: the rows of a
generation that are still to be trained, the rollouts they were chosen from, the metrics gathered since the last log
line, the order of prompts after the first epoch, a reference policy that is synchronised. What is overridden, in the
order in which a resumed run meets it:

- `train`: refuse a checkpoint whose manifest does not hold, before anything of it is loaded.
- `_get_train_sampler`: remember the sampler.
- `_init_training_state`: refuse a checkpoint that cannot go on exactly.
- `_run_epoch`: put the sampler where it was; train nothing where the run was over.
- `_load_rng_state`, and `_save_rng_state` when saving: read and write each process's own state.

Not exact are two. Samples of vLLM are drawn in an engine whose random state cannot be saved: such a run goes on with
the same weights, optimizer and prompts, and other samples. And DDP over three processes or more sums gradients in
another order in its first step than later, unless `ddp_find_unused_parameters` is true (which it is without
`gradient_checkpointing`): they then differ by rounding.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_model, save_model
from trl import GRPOTrainer

from ...errors import UserError
from ...runs.checkpoints import last_good, readable_path, verify
from .config import PODSConfig
from .layout import MicroBatch
from .rollouts import Rollouts
from .state import pack, read_tensors, read_values, slots_to_come, unpack, write_state

logger = logging.getLogger(__name__)
_REFERENCE = "pods_reference.safetensors"


class ResumeMixin(GRPOTrainer):
    """What PODSTrainer adds to TRL's checkpoints, and reads from them."""

    args: PODSConfig
    rollouts: Rollouts | None
    _buffered_inputs: list[MicroBatch] | None

    # Plain values that go on; another mixin adds its own counters.
    _resumed_attributes: tuple[str, ...] = ("_step", "_globalstep_last_logged")
    _train_sampler: Any = None

    checked_checkpoint: Path | None = None  # whose hashes the caller has compared already

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint is resumed from only where it is whole.

        Args:
            resume_from_checkpoint: a folder that a PODSTrainer saved; True: the newest whole one in `output_dir`.
            args: as TRL's, like `kwargs`.

        Raises:
            UserError: the checkpoint is torn, or another trainer saved it, or there is none.
        """
        if not resume_from_checkpoint:
            return super().train(None, *args, **kwargs)
        answer = [self._find_checkpoint(resume_from_checkpoint) if self.is_world_process_zero() else None]
        found, problem = broadcast_object_list(answer)[0]
        if problem:
            raise UserError(problem)
        with readable_path(found) as path:
            return super().train(str(path), *args, **kwargs)

    def _find_checkpoint(self, wanted: str | bool) -> tuple[Path | None, str | None]:
        """The checkpoint to resume from, or what is wrong with it."""
        if wanted is True:
            found, skipped = last_good(Path(self.args.output_dir))
            for line in skipped:
                logger.warning("skipped %s", line)
            torn = "".join(f"\n  skipped {line}" for line in skipped)
            missing = f"No valid checkpoint found in output directory ({self.args.output_dir}){torn}"
            return found, None if found else missing
        folder = Path(str(wanted))
        problems = [] if folder == self.checked_checkpoint else verify(folder)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if not problems:
            return folder, None
        return None, (
            f"resume_from_checkpoint = {wanted}: {problems[0]}{more}. Resume from a whole checkpoint of PODSTrainer, "
            "or start a new run with this folder as its model."
        )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        folder, process = Path(output_dir), self.accelerator.process_index
        tensors: dict[str, torch.Tensor] = {}
        values = {
            "processes": self.accelerator.num_processes,
            "attributes": {name: getattr(self, name) for name in self._resumed_attributes},
            "loss": self._tr_loss.item(),
            "metrics": dict(self._metrics["train"]),
            "generation": pack(self._open_generation(), "generation", tensors),
        }
        write_state(folder, process, values, tensors)
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if self.args.sync_ref_model and self.accelerator.is_main_process and not sharded:
            save_model(self.accelerator.unwrap_model(self.ref_model), str(folder / _REFERENCE))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        folder, process, device = Path(checkpoint), self.accelerator.process_index, self.accelerator.device
        values = read_values(folder, process, self.accelerator.num_processes)
        for name, value in values["attributes"].items():
            setattr(self, name, value)
        self._tr_loss = torch.tensor(values["loss"], device=device)
        self._metrics["train"].clear()
        self._metrics["train"].update(values["metrics"])
        if values["generation"] is not None:
            self._reopen(values["generation"], read_tensors(folder, process))
        if self.args.sync_ref_model:
            load_model(self.accelerator.unwrap_model(self.ref_model), str(folder / _REFERENCE), device=str(device))

    def _open_generation(self) -> dict[str, Any] | None:
        """What is left to train of the latest generation and its record; None where a new one comes next."""
        to_come = slots_to_come(self._step, self.args.steps_per_generation, self.num_iterations)
        if not to_come or self._buffered_inputs is None:
            return None
        assert self.rollouts is not None
        return {
            "buffer": [batch if i in to_come else {} for i, batch in enumerate(self._buffered_inputs)],
            "rollouts": self.rollouts.saved(),
            "logs": {name: _listed(column) for name, column in self._logs.items()} if self.log_completions else {},
        }

    def _reopen(self, generation: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self._buffered_inputs = unpack(generation["buffer"], tensors, self.accelerator.device)
        self.rollouts = Rollouts.restored(unpack(generation["rollouts"], tensors))
        for name, column in generation["logs"].items():
            if isinstance(column, dict):
                for part, values in column.items():
                    self._logs[name][part].extend(values)
            else:
                self._logs[name].extend(column)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        if resume_from_checkpoint is not None:
            self._refuse_inexact(Path(resume_from_checkpoint))
        return super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )

    def _refuse_inexact(self, checkpoint: Path) -> None:
        """Raise UserError where the run could not go on as it would have without the interruption."""
        read_values(checkpoint, self.accelerator.process_index, self.accelerator.num_processes)
        if self.args.ignore_data_skip:
            raise UserError(
                f"{checkpoint}: ignore_data_skip = true would begin again with the first prompts, in the middle of a "
                "generation. Leave it out: prompts that were trained on are passed over without being read."
            )
        if self.args.sync_ref_model and not (checkpoint / _REFERENCE).is_file():
            raise UserError(
                f"{checkpoint} has no {_REFERENCE}: with sync_ref_model = true the reference policy changes in "
                "training, and without it the run cannot go on exactly (a reference that FSDP or DeepSpeed shards is "
                "not saved). Resume from another checkpoint, or start a new run without sync_ref_model."
            )

    def _run_epoch(self, **kwargs: Any) -> None:
        first = kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]
        if first and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if first and self.control.should_training_stop:
            return  # killed after its last step: transformers would train one more
        if first and self._train_sampler is not None:
            for _ in range(kwargs["epoch"]):
                next(iter(self._train_sampler), None)  # each epoch's order comes from where the last left the generator
        super()._run_epoch(**kwargs)


def _listed(column: Any) -> Any:
    """A column of TRL's completions table, or a mapping of them, as lists."""
    return {name: list(part) for name, part in column.items()} if isinstance(column, dict) else list(column)
