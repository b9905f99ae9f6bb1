"""Checkpoints of PODSTrainer: TRL writes them, beside their place; they are published whole or not at all.

What is overridden of TRL:

- `_save_checkpoint`: all processes write under ``.saving/``, one of them publishes, then the older ones are pruned.
- `_finalize_training`: what is pruned at the end is ours, too.
- `_push_from_checkpoint`: what goes to the hub is the published folder, without transformers' pickle.
- `_save`: without that pickle.

For the length of a call the trainer has a `_get_output_dir` of its own, which wins over one of a subclass: while a
checkpoint is written it names ``.saving/``, and at the end an empty folder, so that TRL's rotation finds nothing there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy
from trl import GRPOTrainer

from ...distributed import busy
from ...runs.checkpoints import clean, digest, prepare, prune, publish, readable_path, staging


class SavingMixin(GRPOTrainer):
    """What PODSTrainer changes of TRL's checkpoints: where they are written, never what is in them."""

    recipe_keys: Mapping[str, Any] = MappingProxyType({})  # of the recipe, for the manifest

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
                prepare(target)
            self.accelerator.wait_for_everyone()
            with busy("saving"), readable_path(staged.parent) as place:
                write(place / staged.name)
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
        place = self._get_output_dir(trial)
        target = Path(place, f"checkpoint-{self.state.global_step}")

        def write(folder: Path) -> None:
            pushes = {"_push_from_checkpoint": lambda _: None}  # not yet
            with self._own_methods(_get_output_dir=lambda trial: str(folder.parent), **pushes):
                super(SavingMixin, self)._save_checkpoint(model, trial)
            if self._name_best(place) and self.args.should_save:
                self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        self.publish_folder(target, write)
        self._prune(target.parent)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _name_best(self, place: str) -> bool:
        """Name the best checkpoint as transformers does, by where it is published; whether there is one."""
        step = self.state.best_global_step
        best = os.path.join(place, f"checkpoint-{step}")
        found = bool(step) and self.args.save_strategy != SaveStrategy.NO
        found &= step == self.state.global_step or os.path.isdir(best)
        if found:
            self.state.best_model_checkpoint = best
        return found

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        place = Path(self._get_output_dir(trial))
        self._prune(place, finished=True)

        def nowhere(trial: Any) -> str:
            del self.__dict__["_get_output_dir"]  # TRL asks once; a callback that saves comes after
            return str(staging(place / "nothing"))

        with self._own_methods(_get_output_dir=nowhere):
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _prune(self, place: Path, *, finished: bool = False) -> None:
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            here = best is not None and os.path.isdir(best) and os.path.samefile(os.path.dirname(best), place)
            name = Path(best).name if best is not None and here else None
            prune(place, self.args.save_total_limit or 0, best=name, finished=finished)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with _without_pickle(self.args.output_dir):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save without `training_args.bin`, which nothing reads: config.yaml says how the run was made."""
        with _without_pickle(output_dir or self.args.output_dir):
            super()._save(output_dir, state_dict)

    @contextmanager
    def _own_methods(self, **methods: Callable[..., Any]) -> Iterator[None]:
        self.__dict__.update(methods)
        try:
            yield
        finally:
            for name in methods:
                self.__dict__.pop(name, None)

    def _about(self) -> dict[str, Any]:
        recipe = {"sha256": digest(self.recipe_keys), "keys": dict(self.recipe_keys)}
        return {"step": self.state.global_step, "processes": self.accelerator.num_processes, "recipe": recipe}


@contextmanager
def _without_pickle(folder: str) -> Iterator[None]:
    """Keep transformers from writing `training_args.bin`, and remove one that a trainer of its own left."""
    save = torch.save

    def save_others(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if os.path.basename(str(file)) != TRAINING_ARGS_NAME:
            save(value, file, *args, **kwargs)

    Path(folder, TRAINING_ARGS_NAME).unlink(missing_ok=True)
    torch.save = save_others  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = save
