"""Write and read the state that checkpoints need in addition to those of TRL, so that a killed run resumes bit for bit.

TRL and transformers restore weights, optimizer, schedule and random state. They lose the rows of a generation that are
still to be trained, the rollouts they were chosen from, the metrics since the last line of the log, the order of
prompts after the first epoch, and a synchronised reference policy.

Two cases are not exact. vLLM's random state cannot be saved: such a run resumes with the same weights, optimizer and
prompts, and draws other samples. DDP over three processes or more sums gradients in another order in its first step
than later, unless `ddp_find_unused_parameters` is true (which it is without `gradient_checkpointing`): they differ by
rounding.

Size: m rows a prompt and never n, about `24 T` bytes each (tokens and masks as int64, old and, with `beta`, reference
log-probabilities as float32), so 1.6 MB a prompt with m = 16 and T = 4096. The ledger's text of all n: 17 MB a prompt
with n = 1024 and T = 4096. Between generations, which is every step unless `num_iterations` or
`steps_per_generation` say otherwise, neither is needed: a few hundred bytes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor

from ...errors import UserError
from ...rollouts.record import Rollouts, saved_table
from .compat import TRAINER_STATE_NAME, TRLTrainer
from .dynamic_sampling import NewPrompts

logger = logging.getLogger(__name__)

_REFERENCE = "pods_reference.safetensors"
_TENSOR = "__tensor__"  # the key of a tensor's name in the JSON
_ATTRIBUTES = ("_step", "_globalstep_last_logged")  # TRL's counters, which it does not save
_NAME = re.compile(r"checkpoint-(\d+)")


class ExactResume:
    """Saves the state that TRL loses, and restores it on resume.

    It writes into TRL's checkpoints. A checkpoint of TRL's own trainer is resumed as TRL resumes it. Who wants hashes
    adds a manifest after a checkpoint is complete, in `on_save` of a callback or in a subclass (`training/saving.py`);
    where there is one, it is verified before a resume.
    """

    def __init__(self, trainer: TRLTrainer, new_prompts: NewPrompts) -> None:
        self._trainer, self._new_prompts = trainer, new_prompts
        self._resumed: Path | None = None
        self.verified: Path | None = None  # a checkpoint whose hashes the caller has compared already

    # -- before training ---------------------------------------------------------------------------------------------

    def find(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, the same on all processes; None without a request.

        Args:
            wanted: a folder; True: the newest complete one in `output_dir`.

        Raises:
            UserError: it is incomplete, or cannot be resumed here.
        """
        self._resumed = None
        if not wanted:
            return None
        answer = [self._find(wanted) if self._trainer.is_world_process_zero() else None]
        found, problem = broadcast_object_list(answer)[0]
        if problem:
            raise UserError(problem)
        self._refuse_inexact(found)
        self._resumed = found
        return str(found)

    def _find(self, wanted: str | bool) -> tuple[Path | None, str | None]:
        """Return the checkpoint, or the problem with it."""
        if wanted is not True:
            folder = Path(str(wanted))
            problem = self._problem(folder)
            advice = "Resume from a complete checkpoint, or start a new run with this folder as its model."
            return (folder, None) if not problem else (None, f"resume_from_checkpoint = {wanted}: {problem}. {advice}")
        output = Path(self._trainer.args.output_dir)
        steps = {folder: _NAME.fullmatch(folder.name) for folder in output.glob("checkpoint-*")}
        skipped = ""
        for folder in sorted((f for f, name in steps.items() if name), key=lambda f: int(f.name[11:]), reverse=True):
            if not (problem := self._problem(folder)):
                return folder, None
            logger.warning("skipped %s: %s", folder, problem)
            skipped += f"\n  skipped {folder}: {problem}"
        return None, f"No valid checkpoint found in output directory ({output}){skipped}"

    def _problem(self, folder: Path) -> str | None:
        """Return why a checkpoint is not complete; TRL writes `trainer_state.json` last."""
        from ...runs.checkpoints import MANIFEST, verify

        if not (folder / TRAINER_STATE_NAME).is_file():
            return f"there is no {TRAINER_STATE_NAME}: it is not a checkpoint, or its run was killed while it was saved"
        if (folder / MANIFEST).is_file() and folder != self.verified:
            problems = verify(folder)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return f"{problems[0]}{more}" if problems else None
        return None

    def _refuse_inexact(self, checkpoint: Path) -> None:
        """Raise UserError if the run could not continue where this checkpoint ended."""
        trainer = self._trainer
        values = read_values(checkpoint, trainer.accelerator.process_index, trainer.accelerator.num_processes)
        if not values and trainer.is_world_process_zero():
            logger.warning(
                "%s has no state of PODSTrainer: it is resumed as TRL does, and not bit for bit.", checkpoint
            )
        if trainer.args.ignore_data_skip:
            raise UserError(
                f"{checkpoint}: ignore_data_skip = true would start with the first prompts again, in the middle of a "
                "generation. Remove it: prompts that were trained on are skipped without being read."
            )
        if values and trainer.args.sync_ref_model and not (checkpoint / _REFERENCE).is_file():
            raise UserError(
                f"{checkpoint} has no {_REFERENCE}: with sync_ref_model = true the reference policy changes in "
                "training, and without it the run cannot resume exactly (a reference that FSDP or DeepSpeed shards is "
                "not saved). Resume from another checkpoint, or start a new run without sync_ref_model."
            )

    def begins_finished(self, epoch: int, epochs_trained: int, dataloader: Any) -> bool:
        """At the start of an epoch: restore weights and the order of prompts; return whether the run was finished.

        Otherwise transformers would train one more step of a finished run.
        """
        trainer = self._trainer
        resumed, self._resumed = self._resumed, None
        if resumed is None or epoch != epochs_trained:
            return False
        load_renamed(trainer, str(resumed))
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        if trainer.control.should_training_stop:
            return True
        batches: Any = getattr(dataloader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):  # accelerate's shares of the processes
            batches = batches.batch_sampler
        if batches is not None:
            for _ in range(epoch):
                # Each epoch's order depends on the generator's state after the last one.
                next(iter(batches.sampler), None)
        return False

    # -- the state of a process --------------------------------------------------------------------------------------

    def save(self, folder: Path, record: Rollouts | None) -> None:
        """Write this process's state; the first process writes a synchronised reference policy."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        tensors: dict[str, Tensor] = {}
        values = {
            "processes": accelerator.num_processes,
            "attributes": {name: getattr(trainer, name) for name in _ATTRIBUTES},
            "loss": trainer._tr_loss.item(),
            "metrics": dict(trainer._metrics["train"]),
            "prompts_drawn": self._new_prompts.drawn,
            "generation": take_tensors(self._open_generation(record), "generation", tensors),
        }
        write_state(folder, accelerator.process_index, values, tensors)
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        if trainer.args.sync_ref_model and accelerator.is_main_process and not sharded:
            save_model(accelerator.unwrap_model(trainer.ref_model), str(folder / _REFERENCE))

    def load(self, folder: Path) -> Rollouts | None:
        """Restore this process's state; return the record of a generation that is still to be trained."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        process, device = accelerator.process_index, accelerator.device
        values = read_values(folder, process, accelerator.num_processes)
        if not values:
            return None  # TRL's own checkpoint
        for name in _ATTRIBUTES:
            setattr(trainer, name, values["attributes"][name])
        trainer._tr_loss = torch.tensor(values["loss"], device=device)
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(values["metrics"])
        self._new_prompts.drawn = values["prompts_drawn"]
        if trainer.args.sync_ref_model:
            load_model(accelerator.unwrap_model(trainer.ref_model), str(folder / _REFERENCE), device=str(device))
        generation = values["generation"]
        if generation is None:
            return None
        tensors = read_tensors(folder, process)
        trainer._buffered_inputs = put_tensors(generation["buffer"], tensors, device)
        for name, column in generation["logs"].items():
            if isinstance(column, dict):
                for part, entries in column.items():
                    trainer._logs[name][part].extend(entries)
            else:
                trainer._logs[name].extend(column)
        return Rollouts.restored(put_tensors(generation["rollouts"], tensors))

    def _open_generation(self, record: Rollouts | None) -> dict[str, Any] | None:
        """Return the untrained part of the latest generation and its record; None if a new generation comes next."""
        trainer = self._trainer
        left = slots_left(trainer._step, trainer.args.steps_per_generation, trainer.num_iterations)
        if not left or trainer._buffered_inputs is None:
            return None
        assert record is not None
        return {
            "buffer": [batch if i in left else {} for i, batch in enumerate(trainer._buffered_inputs)],
            "rollouts": record.saved(),
            "logs": saved_table(trainer._logs) if trainer.log_completions else {},
        }


def slots_left(step: int, steps_per_generation: int, num_iterations: int) -> list[int]:
    """Return which of a generation's micro-batches are still trained, or trained again, before the next generation.

    Args:
        step: micro-batches trained so far in the run.
        steps_per_generation: micro-batches of a generation.
        num_iterations: how often each of them is trained.

    Returns:
        Their numbers, ascending; none between generations.

    Example:
        >>> slots_left(3, 4, 1), slots_left(3, 4, 2), slots_left(8, 4, 2)
        ([3], [0, 1, 2, 3], [])
    """
    left = range(step, step - step % -(steps_per_generation * num_iterations))
    return sorted({at % steps_per_generation for at in left})


# -- the files: pods_state_<process>.safetensors for tensors, .json for the rest -------------------------------------


def take_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a nest of mappings and lists with a name in place of each tensor, ready for JSON; a tuple becomes a list.

    Args:
        name: prefix of the tensors' names.
        tensors: gets a copy of each tensor, on the CPU and sharing memory with no other, as safetensors requires.

    Example:
        >>> tensors = {}
        >>> take_tensors([{"ids": torch.ones(2), "skip": False}], "buffer", tensors)
        [{'ids': {'__tensor__': 'buffer.0.ids'}, 'skip': False}]
        >>> tensors
        {'buffer.0.ids': tensor([1., 1.])}
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: take_tensors(part, f"{name}.{key}", tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [take_tensors(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
    return value


def put_tensors(value: Any, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Any:
    """Undo `take_tensors`, with the tensors on `device`.

    Example:
        >>> put_tensors({"kept": {"__tensor__": "kept"}, "first": 0}, {"kept": torch.tensor([3])})
        {'kept': tensor([3]), 'first': 0}
    """
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]].to(device)
        return {key: put_tensors(part, tensors, device) for key, part in value.items()}
    return [put_tensors(part, tensors, device) for part in value] if isinstance(value, list) else value


def write_state(folder: Path, process: int, values: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write one process's state into a checkpoint's folder; numbers that are not finite are kept."""
    if tensors:
        save_file(dict(tensors), _file(folder, process, "safetensors"))
    _file(folder, process, "json").write_text(json.dumps(values, default=_plain), encoding="ascii")


def read_values(folder: Path, process: int, processes: int) -> dict[str, Any]:
    """Return the JSON part of a process's state; empty for a checkpoint of TRL's own trainer.

    Args:
        folder: the checkpoint's.
        process: whose state.
        processes: how many there are now.

    Raises:
        UserError: the checkpoint was made by another number of processes, or holds the state of other processes only.
    """
    own, first = _file(folder, process, "json"), _file(folder, 0, "json")
    file = own if own.is_file() else first  # without a shared file system a node has only its own files
    values: dict[str, Any] = json.loads(file.read_text(encoding="ascii")) if file.is_file() else {}
    made_by = values.get("processes", processes)
    if made_by != processes:
        how = f"with --num_processes {made_by}" if made_by > 1 else "without --num_processes"
        raise UserError(
            f"{folder} was made by {made_by} process{'es' * (made_by > 1)} and {processes} would resume it: each has "
            f"its own rows and random state, so a run resumes with as many as it began with. Start it {how}."
        )
    if not own.is_file() and next(folder.glob("pods_state_*"), None) is not None:
        raise UserError(
            f"{folder} cannot be resumed: it has no {own.name}, only the state of other processes. Copy the files of "
            "all processes into one folder, or resume from another checkpoint."
        )
    return values


def read_tensors(folder: Path, process: int) -> dict[str, Tensor]:
    """Return the tensors of a process's state, on the CPU; an empty dictionary if there are none."""
    file = _file(folder, process, "safetensors")
    return load_file(file) if file.is_file() else {}


def _file(folder: Path, process: int, kind: str) -> Path:
    return folder / f"pods_state_{process}.{kind}"


def _plain(value: Any) -> Any:
    """Return a value for JSON: numbers of numpy and torch by value, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# -- weights ---------------------------------------------------------------------------------------------------------


def load_renamed(trainer: TRLTrainer, folder: str) -> None:
    """Load a checkpoint's weights if their names are not the model's.

    transformers saves the weights of many models with images or experts under the names of their first release. Its
    trainer (5.23) looks for the model's own names, and leaves a weight that it does not find as it was, with a warning.
    Weights that FSDP or DeepSpeed shards, and adapters, are saved under their own names.

    Raises:
        UserError: a weight of the model is missing.
    """
    files = (
        []
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        else sorted(Path(folder).glob("model*.safetensors"))
    )
    bare = trainer.accelerator.unwrap_model(trainer.model)
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as weights:
            names.update(weights.keys())
    if names <= bare.state_dict().keys():
        return
    exact = reduce(torch.promote_types, {weight.dtype for weight in bare.parameters()})
    loaded, about = type(bare).from_pretrained(folder, dtype=exact, output_loading_info=True)
    if about["missing_keys"]:
        raise UserError(
            f"{folder} lacks weights of {type(bare).__name__}: {', '.join(sorted(about['missing_keys'])[:3])}. Resume "
            "from another checkpoint."
        )
    bare.load_state_dict(loaded.state_dict())
