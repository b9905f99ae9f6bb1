"""Checkpoints of PODSTrainer: TRL writes them, beside their place; they are published whole or not at all.

What is overridden of TRL:

- `_save_checkpoint`: all processes write under ``.saving/``, one of them publishes, then the older ones are pruned.
- `_get_output_dir`: while a checkpoint is written it is that folder, so that TRL's own rotation finds nothing older.
- `_push_from_checkpoint`: what goes to the hub is the published folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trl import GRPOTrainer

from ...ranks import busy
from ...runs.checkpoints import clean, digest, prune, publish, staging


class SavingMixin(GRPOTrainer):
    """What PODSTrainer changes of TRL's checkpoints: where they are written, never what is in them."""

    recipe_keys: Mapping[str, Any] = MappingProxyType({})  # of the recipe, for the manifest
    _written_to: Path | None = None

    def publish_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        """Have every process write a folder, and put it in its place once it is whole, with its manifest.

        Where a process cannot write, the error is raised there and what was at ``target`` stays.

        Args:
            target: ``checkpoints/checkpoint-4``, ``checkpoints/final``.
            write: writes its process's part into the folder it is given, which is there already.
        """
        staged, publishes = staging(target), self.args.should_save
        try:
            if publishes:
                clean(target.parent)
                staged.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            with busy("saving"):
                write(staged)
            self.accelerator.wait_for_everyone()
            with busy("saving"):
                if publishes:
                    publish(target, self._about())
        except BaseException:
            if publishes:
                clean(target.parent)  # what is half written gives its room back
            raise
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        target = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"

        def write(folder: Path) -> None:
            self._written_to = folder.parent
            try:
                super(SavingMixin, self)._save_checkpoint(model, trial)
            finally:
                self._written_to = None

        self.publish_folder(target, write)
        if self.args.should_save:
            prune(target.parent, self.args.save_total_limit or 0)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(target))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._written_to or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._written_to is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _about(self) -> dict[str, Any]:
        recipe = {"sha256": digest(self.recipe_keys), "keys": dict(self.recipe_keys)}
        return {"step": self.state.global_step, "processes": self.accelerator.num_processes, "recipe": recipe}
