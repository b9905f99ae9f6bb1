"""Checkpoints of `pods train`: TRL's, published atomically with a manifest, and the final policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers.trainer import TRAINING_ARGS_NAME

from ..engines.trl import PODSTrainer
from ..engines.trl.compat import standing_in
from ..runs.checkpoints import clean, digest, prepare, prune, publish, staging


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
        recipe = {"sha256": digest(self.recipe_keys), "keys": dict(self.recipe_keys)}
        about = {"step": self.state.global_step, "processes": accelerator.num_processes, "recipe": recipe}
        try:
            if publishes:
                prepare(target)
            accelerator.wait_for_everyone()
            write(staging(target))
            accelerator.wait_for_everyone()
            if publishes:
                publish(target, about)
        except BaseException:
            if publishes:
                clean(target.parent)  # free the space of a half-written folder
            raise
        accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint
        target = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")

        def write(folder: Path) -> None:
            # TRL writes in the output folder, which is replaced by .saving/.
            with (
                standing_in(self, _get_output_dir=lambda trial: str(folder.parent)),
                cache_on(self.accelerator.unwrap_model(self.model)),
            ):
                save(model, trial)
            if self.args.should_save:  # a pickle, which nothing reads: config.yaml has the settings
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)

        self.publish_folder(target, write)
        if self.args.should_save:
            prune(target.parent, self.args.save_total_limit or 0)


def save_policy(trainer: PODSTrainer, folder: Path) -> None:
    """Write policy and tokenizer as safetensors and JSON. Call it on every process; the first one writes.

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
