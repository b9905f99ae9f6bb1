"""Files that a trainer writes: complete checkpoints, published atomically with a manifest, and the final policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...distributed import busy
from ...errors import UserError
from ...runs.checkpoints import clean, digest, prepare, prune, publish, readable_path, staging
from .compat import TRAINER_STATE_NAME, SaveStrategy, TRLTrainer, standing_in


class Checkpoints:
    """Writes and prunes checkpoints; TRL decides their content.

    All processes write under ``.saving/``, the first publishes the folder, then the older ones are pruned.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer

    def publish(self, target: Path, write: Callable[[Path], None], recipe_keys: Mapping[str, Any]) -> None:
        """Have every process write its part of a folder, then publish the complete folder with a manifest.

        If a process cannot write, the error is raised there and ``target`` is unchanged.

        Args:
            target: ``checkpoints/checkpoint-4``, ``checkpoints/final``.
            write: writes the process's part into the given folder, which exists.
            recipe_keys: the recipe's keys, for the manifest.
        """
        accelerator, publishes = self._trainer.accelerator, self._trainer.args.should_save
        staged = staging(target)
        recipe = {"sha256": digest(recipe_keys), "keys": dict(recipe_keys)}
        about = {"step": self._trainer.state.global_step, "processes": accelerator.num_processes, "recipe": recipe}
        try:
            if publishes:
                prepare(target)
            accelerator.wait_for_everyone()
            with busy("saving"), readable_path(staged.parent) as place:
                write(place / staged.name)
            accelerator.wait_for_everyone()
            with busy("saving"):
                if publishes:
                    publish(target, about)
        except BaseException:
            if publishes:
                clean(target.parent)  # free the space of a half-written folder
            raise
        accelerator.wait_for_everyone()

    def save(self, trial: Any, save: Callable[[], None], recipe_keys: Mapping[str, Any]) -> Path:
        """Publish the checkpoint that TRL's `save` writes, and prune the older ones; return its folder."""
        trainer = self._trainer
        output = trainer._get_output_dir(trial)
        target = Path(output, f"checkpoint-{trainer.state.global_step}")

        def write(folder: Path) -> None:
            # TRL writes and pushes in the output folder: writing is redirected to .saving/, pushing comes later.
            beneath, nothing = (lambda trial: str(folder.parent)), (lambda folder: None)
            with standing_in(trainer, _get_output_dir=beneath, _push_from_checkpoint=nothing):
                save()
            if self._name_best(output) and trainer.args.should_save:
                trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        self.publish(target, write, recipe_keys)
        self._prune(target.parent)
        return target

    def finalize(self, trial: Any, finalize: Callable[[], Any]) -> Any:
        """Prune for the last time, and call TRL's `finalize` with an empty folder for its own rotation."""
        trainer, output = self._trainer, self._trainer._get_output_dir
        place = Path(output(trial))
        self._prune(place, finished=True)
        empty = iter([str(staging(place / "nothing"))])  # TRL reads it once; callbacks that save come later
        with standing_in(trainer, _get_output_dir=lambda trial: next(empty, None) or output(trial)):
            return finalize()

    def _name_best(self, output: str) -> bool:
        """Set the best checkpoint as transformers does, with its published path; return whether there is one."""
        args, state = self._trainer.args, self._trainer.state
        step = state.best_global_step
        best = os.path.join(output, f"checkpoint-{step}")
        found = bool(step) and args.save_strategy != SaveStrategy.NO
        found &= step == state.global_step or os.path.isdir(best)
        if found:
            state.best_model_checkpoint = best
        return found

    def _prune(self, place: Path, *, finished: bool = False) -> None:
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        if args.should_save:
            here = best is not None and os.path.isdir(best) and os.path.samefile(os.path.dirname(best), place)
            name = Path(best).name if best is not None and here else None
            prune(place, args.save_total_limit or 0, best=name, finished=finished)


def load_renamed(trainer: TRLTrainer, model: Any, folder: str) -> bool:
    """Load a checkpoint's weights if their names are not the model's; return whether they were loaded.

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
    bare = trainer.accelerator.unwrap_model(model)
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as weights:
            names.update(weights.keys())
    if names <= bare.state_dict().keys():
        return False
    exact = reduce(torch.promote_types, {weight.dtype for weight in bare.parameters()})
    loaded, about = type(bare).from_pretrained(folder, dtype=exact, output_loading_info=True)
    if about["missing_keys"]:
        raise UserError(
            f"{folder} lacks weights of {type(bare).__name__}: {', '.join(sorted(about['missing_keys'])[:3])}. Resume "
            "from another checkpoint."
        )
    bare.load_state_dict(loaded.state_dict())
    return True


def save_policy(trainer: TRLTrainer, folder: Path) -> None:
    """Write policy and tokenizer as safetensors and JSON. Collective; the first process writes.

    Sharded weights (FSDP2, ZeRO-3) are gathered in the first process's memory. For LoRA, only the adapter is written.

    Args:
        folder: made if missing; files of the same names are replaced.
    """
    sharded = trainer._dist.is_fsdp or trainer._dist.is_zero3
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if trainer.is_world_process_zero():
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if weights:  # tied weights were gathered as separate tensors
            for tied in getattr(policy, "all_tied_weights_keys", ()):
                weights.pop(tied, None)
        with cache_on(policy):
            policy.save_pretrained(folder, state_dict=weights)
        trainer.processing_class.save_pretrained(folder)


@contextmanager
def cache_on(policy: Any) -> Iterator[None]:
    """Save `use_cache` as the policy generates: transformers' trainer turns it off in the configuration to train."""
    as_loaded = getattr(getattr(policy, "generation_config", None), "use_cache", True)
    with standing_in(policy.config, use_cache=as_loaded):
        yield
