"""Find the checkpoint that a run resumes from, and check that it belongs to the recipe. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ..errors import UserError
from ..recipe import Recipe
from ..recipe.recipe import changed_keys
from ..runs import Run, is_run
from ..runs.checkpoints import MANIFEST, last_good
from ..runs.files import CHECKPOINTS, read_mapping

CHANGED = "--allow_changed_recipe"


class Start(NamedTuple):
    """The checkpoint that a run resumes from.

    ``checkpoint`` is None if no step was made: the run starts again. ``skipped`` has a line for each newer checkpoint
    that is damaged, ``changed`` one for each key that differs from the checkpoint's.
    """

    checkpoint: Path | None
    skipped: list[str]
    changed: list[str]

    def describe(self) -> list[str]:
        """Return lines to display."""
        origin = f"from {self.checkpoint.name}" if self.checkpoint else "from the beginning: it had made no step"
        lines = [f"resumes {origin}", *(f"skipped {line}" for line in self.skipped)]
        return lines + [f"changed recipe, allowed by {CHANGED}: {line}" for line in self.changed]


def find_start(recipe: Recipe, output: Path, *, processes: int, changed: bool = False, hashes: bool = True) -> Start:
    """Return the last complete checkpoint of a run, after checking that it belongs to the recipe.

    Args:
        recipe: the recipe to resume with.
        output: the run directory.
        processes: the number of processes that will train.
        changed: accept a checkpoint even if keys outside `recipe.FREE` differ.
        hashes: passed to `runs.checkpoints.verify`.

    Raises:
        UserError: there is no run, or steps but no complete checkpoint, or the checkpoint belongs to another
            recipe or another number of processes.
    """
    if not is_run(output):
        raise UserError(f"--resume: {output} holds no run to resume.")
    checkpoint, skipped = last_good(output / CHECKPOINTS, hashes=hashes)
    if checkpoint is None:
        run = Run(output)
        if run.metrics or skipped:
            damaged = "".join(f"\n  skipped {line}" for line in skipped)
            raise UserError(
                f"--resume: {output} ({run.state}) has no {'complete ' if skipped else ''}checkpoint to resume from, "
                "and its results would be lost. Start again in another --output, with save_steps or save_seconds low "
                f"enough.{damaged}"
            )
        return Start(None, skipped, [])
    manifest = read_mapping(checkpoint / MANIFEST)
    saved = manifest.get("processes") or processes
    if saved != processes:
        option = f"with --num_processes {saved}" if saved > 1 else "without --num_processes"
        raise UserError(
            f"--resume: {checkpoint} was made by {saved} process{'es' * (saved > 1)}, and {processes} would resume it: "
            f"each process saves its own random state and rows. Resume {option}."
        )
    keys = (manifest.get("recipe") or {}).get("keys")  # absent if the trainer was used without a recipe
    differ = changed_keys(keys, recipe.values) if keys else []
    if differ and not changed:
        raise UserError(
            f"--resume: {checkpoint} was made with another recipe: {', '.join(differ)}. Resume with its own recipe "
            f"(pods train --output {output} --resume), start another run in a new --output, or add {CHANGED} to resume "
            "with the changes."
        )
    return Start(checkpoint, skipped, differ)


def last_lines(output: Path, launch: str = "", *, shown_as: Path | None = None) -> list[str]:
    """Return lines on where a run lies, its last checkpoint, how to resume it, and what to do next.

    There are none for a run that failed before its first step.

    Args:
        output: the run directory.
        launch: options of the command that resumes.
        shown_as: the run directory as the lines name it. If None, `output`.
    """
    run = Run(output)
    shown_as = shown_as or output
    place = quote(str(shown_as))
    if run.state == "unknown" or (run.state == "failed" and not run.metrics):
        return []
    good, _ = last_good(output / CHECKPOINTS, hashes=False)
    resume = f"pods train --output {place}{launch} --resume"
    rows = [("run", f"{shown_as} ({run.state} at step {run.step})")]
    policy = good if run.state != "finished" else run.final_checkpoint
    if policy:
        rows.append(("checkpoint", str(shown_as / policy.relative_to(output))))
    if run.state != "finished" and (good or not run.metrics):
        rows.append(("resume", resume))
    elif run.state == "finished" and good:
        longer = "max_seconds" if run.config.get("max_seconds") else "max_steps"
        rows.append(("longer", f"{resume} --{longer} N"))
    if run.evals:
        rows.append(("report", f"pods report {place}"))
    rows.append(("watch", f"pods watch {place}"))
    if policy:
        rows.append(("evaluate", f"pods eval --run {place}"))
    return [f"{name:<12}{text}" for name, text in rows]
