"""Checkpoints of `pods train`: TRL's, published atomically with a manifest, and the final policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy

from ..engines.trl import PODSTrainer
from ..engines.trl.compat import standing_in
from ..runs.checkpoints import clean, digest, prepare, prune, publish, readable_path, staging
from ..text import plain_text


class RunTrainer(PODSTrainer):
    """The trainer of a run: its checkpoints appear at once and complete, with a manifest of hashes.

    All processes write under ``.saving/``, the first publishes the folder, then the older ones are pruned. TRL decides
    their content.
    """

    recipe_keys: Mapping[str, Any] = MappingProxyType({})  # of the recipe, for manifests

    def publish_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        """Have every process write its part of a folder, then publish the complete folder with a manifest.

        If a process cannot write, the error is raised there and ``target`` is unchanged.

        Args:
            target: ``checkpoints/checkpoint-4``, ``checkpoints/final``.
            write: writes the process's part into the given folder, which exists.
        """
        accelerator, publishes = self.accelerator, self.args.should_save
        staged = staging(target)
        recipe = {"sha256": digest(self.recipe_keys), "keys": dict(self.recipe_keys)}
        about = {"step": self.state.global_step, "processes": accelerator.num_processes, "recipe": recipe}
        try:
            if publishes:
                prepare(target)
            accelerator.wait_for_everyone()
            with readable_path(staged.parent) as place:
                write(place / staged.name)
            accelerator.wait_for_everyone()
            if publishes:
                publish(target, about)
        except BaseException:
            if publishes:
                clean(target.parent)  # free the space of a half-written folder
            raise
        accelerator.wait_for_everyone()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `PODSTrainer` does; the path of the checkpoint need not be UTF-8."""
        if not isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = self._resume.find(resume_from_checkpoint)
            self._resume.verified = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if resume_from_checkpoint is None:
            return super().train(None, *args, **kwargs)
        folder = Path(resume_from_checkpoint)
        with readable_path(folder) as path:
            if self._resume.verified == folder:
                self._resume.verified = path
            return super().train(str(path), *args, **kwargs)

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card; the folder's name need not be UTF-8."""
        super().create_model_card(model_name and plain_text(model_name), *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save, output = super()._save_checkpoint, self._get_output_dir(trial)
        target = Path(output, f"checkpoint-{self.state.global_step}")

        def write(folder: Path) -> None:
            # TRL writes in the output folder, which is replaced by .saving/.
            with (
                standing_in(self, _get_output_dir=lambda trial: str(folder.parent)),
                cache_on(self.accelerator.unwrap_model(self.model)),
            ):
                save(model, trial)
            if self.args.should_save:
                # A pickle, which nothing reads: config.yaml has the settings.
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
                if self._name_best(output):
                    self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        self.publish_folder(target, write)
        self._prune(target.parent)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        # transformers' rotation at the end would delete folders that are not checkpoints of this run.
        output = self._get_output_dir
        place = Path(output(trial))
        self._prune(place, finished=True)
        empty = iter([str(staging(place / "nothing"))])  # read once; callbacks that save come later
        with standing_in(self, _get_output_dir=lambda trial: next(empty, None) or output(trial)):
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _name_best(self, output: str) -> bool:
        """Set the best checkpoint as transformers does, with its published path; return whether there is one."""
        args, state = self.args, self.state
        step = state.best_global_step
        best = os.path.join(output, f"checkpoint-{step}")
        found = bool(step) and args.save_strategy != SaveStrategy.NO
        found &= step == state.global_step or os.path.isdir(best)
        if found:
            state.best_model_checkpoint = best
        return found

    def _prune(self, place: Path, *, finished: bool = False) -> None:
        args, best = self.args, self.state.best_model_checkpoint
        if args.should_save:
            here = best is not None and os.path.isdir(best) and os.path.samefile(os.path.dirname(best), place)
            name = Path(best).name if best is not None and here else None
            prune(place, args.save_total_limit or 0, best=name, finished=finished)


def save_policy(trainer: PODSTrainer, folder: Path) -> None:
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
