"""Going on with a run: from which checkpoint, and whether it belongs to the recipe. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..recipe import Recipe
from ..recipe.recipe import changed_keys
from ..runs import Run, is_run
from ..runs.checkpoints import last_good, read_manifest
from ..runs.files import CHECKPOINTS

CHANGED = "--allow_changed_recipe"


class Start(NamedTuple):
    """Where a run goes on.

    ``checkpoint``: None: from the beginning, for it had made no step. ``passed_over``: a line for each newer
    checkpoint that does not hold. ``changed``: a line for each key that differs from the checkpoint's.
    """

    checkpoint: Path | None
    passed_over: list[str]
    changed: list[str]

    @property
    def step(self) -> int:
        return int(self.checkpoint.name.rsplit("-", 1)[1]) if self.checkpoint else -1

    def describe(self) -> list[str]:
        """What a person is told, a line each."""
        origin = f"from {self.checkpoint.name}" if self.checkpoint else "from the beginning: it had made no step"
        lines = [f"goes on {origin}", *(f"passed over {line}" for line in self.passed_over)]
        return lines + [f"another recipe, as asked for: {line}" for line in self.changed]


def find_start(recipe: Recipe, output: Path, *, processes: int, changed: bool = False, hashes: bool = True) -> Start:
    """The last checkpoint of a run that is whole and belongs to a recipe.

    Args:
        recipe: to go on with.
        output: the run.
        processes: how many will train.
        changed: take it where keys differ that belong to the checkpoint (`recipe.resuming`), too.
        hashes: as `runs.checkpoints.verify` takes it.

    Raises:
        UserError: there is no run, or no whole checkpoint though steps were made, or it is of another recipe or another
            number of processes.
    """
    if not is_run(output):
        raise UserError(f"--resume: {output} holds no run to go on with.")
    checkpoint, passed = last_good(output / CHECKPOINTS, hashes=hashes)
    if checkpoint is None:
        _refuse_to_lose(output, passed)
        return Start(None, passed, [])
    manifest = read_manifest(checkpoint)
    made = manifest.get("recipe") or {}
    # a trainer that was used without a recipe left none to compare
    differ = changed_keys(made.get("keys") or {}, recipe.values) if made.get("keys") else []
    saved = manifest.get("processes") or processes
    if saved != processes:
        how = f"with --num_processes {saved}" if saved > 1 else "without --num_processes"
        raise UserError(
            f"--resume: {checkpoint} was made by {saved} process{'es' * (saved > 1)}, and {processes} would go on from "
            f"it: each has random numbers and rows of its own. Resume {how}."
        )
    if differ and not changed:
        raise UserError(
            f"--resume: {checkpoint} was made with another recipe: {', '.join(differ)}. Go on with its own "
            f"(pods train --output {output} --resume), start another run in a new --output, or, to go on with it "
            f"all the same, give {CHANGED} too."
        )
    return Start(checkpoint, passed, differ)


def newest_run(recipe: Recipe, runs: Path = Path("runs")) -> Path:
    """The newest run that `pods train` named after a recipe: ``runs/<recipe>-<date>-<time>``.

    Raises UserError where there is none.
    """
    made = re.compile(re.escape(recipe.name) + r"-\d{8}-\d{6}")
    found = sorted(path.name for path in runs.glob("*") if made.fullmatch(path.name) and is_run(path))
    if not found:
        raise UserError(f"--resume: no run of {recipe.name} under {runs}: name the run to go on with by --output.")
    return runs / found[-1]


def _refuse_to_lose(output: Path, passed: list[str]) -> None:
    run = Run(output)
    if not run.metrics and not passed:
        return
    torn = "".join(f"\n  passed over {line}" for line in passed)
    raise UserError(
        f"--resume: {output} ({run.state}) has no {'whole ' if passed else ''}checkpoint to go on from, and what it "
        f"holds would be lost: start again in another --output, with save_steps or save_seconds low enough.{torn}"
    )
