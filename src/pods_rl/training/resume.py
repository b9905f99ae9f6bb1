"""Find the checkpoint that a run resumes from, and check that it belongs to the recipe. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ..errors import UserError
from ..recipe import Recipe
from ..recipe.contents import Contents
from ..recipe.recipe import changed_keys
from ..runs import Run, is_run
from ..runs.checkpoints import MANIFEST, last_good
from ..runs.files import CHECKPOINTS, read_mapping
from ..runs.identity import changed_contents
from ..text import counted
from .display import result_of

ALLOW_CHANGES = "--allow_changes"


class Start(NamedTuple):
    """The checkpoint that a run resumes from.

    ``checkpoint`` is None if no step was made: the run starts again. ``skipped`` has a line for each newer checkpoint
    that is damaged, ``changed`` one for each key that differs from the checkpoint's, or whose files differ.
    """

    checkpoint: Path | None
    skipped: list[str]
    changed: list[str]

    def describe(self) -> list[str]:
        """Return lines to display."""
        if self.checkpoint:
            lines = [f"resumes from {self.checkpoint.name}"]
        else:
            lines = ["resumes from the beginning: it had made no step"]
        lines += [f"skipped {damaged}" for damaged in self.skipped]
        lines += [f"changed, allowed by {ALLOW_CHANGES}: {difference}" for difference in self.changed]
        return lines


def find_start(
    recipe: Recipe,
    output: Path,
    *,
    processes: int,
    contents: Contents | None = None,
    allow_changes: bool = False,
    hashes: bool = True,
) -> Start:
    """Return the last complete checkpoint of a run, after checking that it belongs to the recipe and its contents.

    Args:
        recipe: the recipe to resume with.
        output: the run directory.
        processes: the number of processes that will train.
        contents: of what the recipe names now (`recipe.contents`). If None, they are not compared.
        allow_changes: accept a checkpoint even if keys outside `recipe.FREE` or the contents differ.
        hashes: passed to `runs.checkpoints.verify`.

    Raises:
        UserError: there is no run, or steps but no complete checkpoint, or the checkpoint belongs to another
            recipe, to other contents or to another number of processes.
    """
    if not is_run(output):
        raise UserError(f"--resume: {output} holds no run to resume.")
    run = Run(output)
    if run.config and "task" not in run.config:
        raise UserError(f"--resume: a script made the run in {output}. Continue it with that script.")
    checkpoint, skipped = last_good(output / CHECKPOINTS, hashes=hashes)
    if checkpoint is None:
        if run.metrics or skipped:  # starting again would delete them
            missing = "complete checkpoint" if skipped else "checkpoint"
            damaged = "".join(f"\n  skipped {line}" for line in skipped)
            raise UserError(
                f"--resume: {output} ({run.state}) has no {missing} to resume from, and its results would be lost. "
                f"Start again in another --output, with save_steps or save_seconds low enough.{damaged}"
            )
        return Start(None, skipped, [])
    manifest = read_mapping(checkpoint / MANIFEST)
    saved_processes = manifest.get("processes") or processes
    if saved_processes != processes:
        option = f"with --num_processes {saved_processes}" if saved_processes > 1 else "without --num_processes"
        raise UserError(
            f"--resume: {checkpoint} was made by {counted(saved_processes, 'process', 'es')}, and {processes} would "
            f"resume it: each process saves its own random state and rows. Resume {option}."
        )
    saved_recipe = manifest.get("recipe") or {}  # absent if the trainer was used without a recipe
    saved_keys = saved_recipe.get("keys")
    changes = changed_keys(saved_keys, recipe.values) if saved_keys else []
    if contents:
        changes += changed_contents(manifest.get("contents"), contents)
    if changes and not allow_changes:
        raise UserError(
            f"--resume: the recipe, or what it names, has changed since {checkpoint} was made: {', '.join(changes)}. "
            f"Resume with the recipe of the run (pods train --output {output} --resume), restore what it names, start "
            f"another run in a new --output, or add {ALLOW_CHANGES} to resume with the changes."
        )
    return Start(checkpoint, skipped, changes)


def last_lines(output: Path, launch: str = "", *, shown_as: Path | None = None) -> list[str]:
    """Return lines on where a run lies, what it reached, how to resume it, and what to do next.

    There are none for a run that failed before its first step.

    Args:
        output: the run directory.
        launch: options of the command that resumes.
        shown_as: the run directory as the lines name it. If None, `output`.
    """
    run = Run(output)
    shown_as = shown_as or output
    folder = quote(str(shown_as))
    if run.state == "unknown" or (run.state == "failed" and not run.metrics):
        return []
    finished = run.state == "finished"
    last_checkpoint, _ = last_good(output / CHECKPOINTS, hashes=False)
    rows = [("run", f"{shown_as} ({run.state} at step {run.step})")]
    if run.evals:
        rows.append(("result", result_of(run.evals)))
    if not finished and (last_checkpoint or not run.metrics):  # steps without a checkpoint cannot be resumed
        rows.append(("resume", f"pods train --output {folder}{launch} --resume"))
    if run.evals:
        rows.append(("report", f"pods report {folder}"))
    elif finished:
        rows.append(("evaluate", f"pods eval --run {folder}"))
    return [f"{name:<12}{text}" for name, text in rows]
