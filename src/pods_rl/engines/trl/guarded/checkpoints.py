"""Write and read the state that checkpoints need in addition to those of TRL, so that a killed run resumes bit for bit.

TRL and transformers restore weights, optimizer, schedule and random state. They lose the rows of a generation that are
still to be trained, the rollouts they were chosen from, the metrics since the last line of the log, the order of
prompts after the first epoch, and a synchronised reference policy.

Three cases are not exact. On a GPU backward passes add in an order that varies, unless `full_determinism` is set.
vLLM's random state cannot be saved: such a run resumes with the same weights, optimizer and prompts, and draws other
samples. DDP over three processes or more sums gradients in another order in its first step than later, unless
`ddp_find_unused_parameters` is true (which it is without `gradient_checkpointing`): they differ by rounding.

Size: a few hundred bytes between generations, which is every step unless `num_iterations` or `steps_per_generation` say
otherwise. Within one, m rows a prompt, 1.6 MB with m = 16 and T = 4096, and the text of all n rollouts.
"""

from __future__ import annotations

import json
import logging
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor

from ....errors import UserError
from ..compat import TRAINER_STATE_NAME, Layer, TRLTrainer

logger = logging.getLogger(__name__)

_REFERENCE = "pods_reference.safetensors"
_TENSOR = "__tensor__"  # the key of a tensor's name in the JSON
_ATTRIBUTES = ("_step", "_globalstep_last_logged")  # TRL's counters, which it does not save


class ExactResume:
    """Saves the state that TRL loses, and restores it on resume.

    It writes into TRL's checkpoints. A checkpoint of TRL's own trainer is resumed as TRL resumes it.
    """

    def __init__(self, trainer: Layer) -> None:
        self._trainer = trainer
        self._resumed: Path | None = None

    # -- before training ---------------------------------------------------------------------------------------------

    def find(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, the same on all processes; None without a request.

        Args:
            wanted: a folder. If True, the newest complete one in `output_dir`.

        Raises:
            UserError: it is incomplete, or cannot be resumed here.
        """
        self._resumed = None
        if not wanted:
            return None
        trainer = self._trainer
        found: Any = self._find(wanted) if trainer.is_world_process_zero() else None
        # The first process decides: the others may not see its files yet.
        checkpoint = broadcast_object_list([found])[0]
        if checkpoint is None:
            where = trainer.args.output_dir if wanted is True else wanted
            raise UserError(
                f"No complete checkpoint found in {where}: there is no {TRAINER_STATE_NAME}, which a run writes last. "
                "Resume from another checkpoint, or start a new run."
            )
        values = read_state(checkpoint, trainer.accelerator.process_index, trainer.accelerator.num_processes)
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
                f"{checkpoint} has no {_REFERENCE}, the reference policy that sync_ref_model changes (one that FSDP or "
                "DeepSpeed shards is not saved). Resume from another checkpoint, or start a new run without "
                "sync_ref_model."
            )
        self._resumed = checkpoint.absolute()  # a callback may change the working directory
        return str(self._resumed)

    def _find(self, wanted: str | bool) -> Path | None:
        """Return the checkpoint, or None without a complete one."""
        from ....runs.checkpoints import find_checkpoints

        if wanted is True:
            folders = list(reversed(find_checkpoints(Path(self._trainer.args.output_dir))))  # the newest first
        else:
            folders = [Path(str(wanted))]
        for folder in folders:
            if (folder / TRAINER_STATE_NAME).is_file():  # TRL writes it last
                return folder
        return None

    def begins_finished(self, epoch: int, epochs_trained: int, dataloader: Any) -> bool:
        """Restore weights and the order of prompts; return whether the run was finished, and needs no more step."""
        trainer = self._trainer
        resumed = self._resumed
        self._resumed = None  # the epochs after this one begin as always
        if resumed is None or epoch != epochs_trained:
            return False
        load_renamed(trainer, str(resumed))
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        if trainer.control.should_training_stop:
            return True
        # The order of an epoch's prompts depends on the generator's state after the epochs before.
        batches: Any = getattr(dataloader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):  # accelerate's shares of the processes
            batches = batches.batch_sampler
        for _ in range(epoch if batches is not None else 0):
            next(iter(batches.sampler), None)
        return False

    # -- the state of a process --------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write this process's state; the first process writes a synchronised reference policy."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        generation: dict[str, Any] | None = None
        # TRL generates again when its counter reaches this multiple. Before it, the latest generation is still trained.
        if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0:
            generation = {
                "buffer": trainer._buffered_inputs,
                "rollouts": trainer.rollouts and trainer.rollouts.saved(),
            }
        values = {
            "processes": accelerator.num_processes,
            "attributes": {name: getattr(trainer, name) for name in _ATTRIBUTES},
            "loss": trainer._tr_loss.item(),
            "metrics": trainer._metrics["train"],
            "generation": generation,
            **trainer._saved_values(),
        }
        write_state(folder, accelerator.process_index, values)
        if trainer.args.sync_ref_model and accelerator.is_main_process and not _is_sharded(trainer):
            save_model(accelerator.unwrap_model(trainer.ref_model), str(folder / _REFERENCE))

    def load(self, folder: Path) -> None:
        """Restore this process's state."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        device = accelerator.device
        values = read_state(folder, accelerator.process_index, accelerator.num_processes)
        if not values:
            return  # TRL's own checkpoint
        for name in _ATTRIBUTES:
            setattr(trainer, name, values["attributes"][name])
        trainer._tr_loss = torch.tensor(values["loss"], device=device)
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(values["metrics"])
        if trainer.args.sync_ref_model:
            load_model(accelerator.unwrap_model(trainer.ref_model), str(folder / _REFERENCE), device=str(device))
        generation = values["generation"]
        trainer._restore_values(values, generation and generation["rollouts"])
        if generation is not None:
            trainer._buffered_inputs = send_to_device(generation["buffer"], device)


def _is_sharded(trainer: TRLTrainer) -> bool:
    return trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled


# -- the files: pods_state_<process>.json, and .safetensors for its tensors -------------------------------------------


def write_state(folder: Path, process: int, values: dict[str, Any]) -> None:
    """Write one process's state into a checkpoint's folder.

    Numbers that are not finite are kept. A tuple becomes a list, and what is neither a number, text nor a tensor, text.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))  # safetensors refuses tensors that share memory
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {_TENSOR: name}
        if hasattr(value, "tolist"):  # a number of numpy
            return value.tolist()
        return str(value)

    _file(folder, process, "json").write_text(json.dumps(_escaped(values), default=plain), encoding="ascii")
    if tensors:
        save_file(tensors, _file(folder, process, "safetensors"))


def _escaped(value: Any) -> Any:
    """Return plain data with the items of each mapping that would be read as a tensor."""
    if isinstance(value, dict):
        entries = {key: _escaped(entry) for key, entry in value.items()}
        # A policy may write any key in the arguments of a tool.
        return {_TENSOR: [*entries.items()]} if entries.keys() == {_TENSOR} else entries
    if isinstance(value, (list, tuple)):
        return [_escaped(entry) for entry in value]
    return value


def read_state(folder: Path, process: int, processes: int) -> dict[str, Any]:
    """Return the state of a process, with its tensors on the CPU; empty for a checkpoint of TRL's own trainer.

    Raises:
        UserError: the checkpoint was made by another number of processes, or has no state of this one.
    """
    # Of no process: if only the file of this one is missing, the checkpoint is refused below.
    if next(folder.glob("pods_state_*"), None) is None:
        return {}
    values_file = _file(folder, process, "json")
    tensors_file = _file(folder, process, "safetensors")
    # a state without tensors has no such file
    tensors = load_file(tensors_file) if tensors_file.is_file() else {}

    def restored(entry: dict[str, Any]) -> Any:
        if entry.keys() != {_TENSOR}:
            return entry
        content = entry[_TENSOR]
        return tensors[content] if isinstance(content, str) else dict(content)

    values: dict[str, Any] = {}
    if values_file.is_file():
        values = dict(json.loads(values_file.read_text(encoding="ascii"), object_hook=restored))
    if values.get("processes") != processes:
        raise UserError(
            f"{folder} was not made by {processes} process(es), or has no {values_file.name}: each process has its "
            "own rows and random state. Start as many processes as the run began with, with the files of all of them "
            "in one folder."
        )
    return values


def _file(folder: Path, process: int, kind: str) -> Path:
    return folder / f"pods_state_{process}.{kind}"


# -- weights ---------------------------------------------------------------------------------------------------------


def load_renamed(trainer: TRLTrainer, folder: str) -> None:
    """Load a checkpoint's weights if their names are not the model's.

    transformers saves the weights of many models with images or experts under the names of their first release. Its
    trainer (5.23) looks for the model's own names, and leaves a weight that it does not find as it was, with a warning.
    Weights that FSDP or DeepSpeed shards, and adapters, are saved under their own names.

    Raises:
        UserError: a weight of the model is missing.
    """
    if _is_sharded(trainer):
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    saved_names: set[str] = set()
    for file in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(file, "pt") as weights:
            saved_names.update(weights.keys())
    if saved_names <= model.state_dict().keys():
        return
    # The widest dtype of the model, so that no weight is rounded on its way.
    dtype = reduce(torch.promote_types, {weight.dtype for weight in model.parameters()})
    loaded, info = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{folder} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}. Resume from another "
            "checkpoint."
        )
    model.load_state_dict(loaded.state_dict())
