"""Read a run, and find the runs of an experiment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import files
from .checkpoints import find_checkpoints
from .files import number, read_jsonl, read_mapping, step_of


class Run:
    """A snapshot of a run directory; each file is read once, on first use.

    A missing file counts as empty. A line truncated by a kill is skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped: dict[str, list[int]] = {files.METRICS: [], files.EVALS: []}  # lines, once the file is read

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Return the run at ``path``; raise UserError if there is none."""
        path = Path(path)
        if not is_run(path):
            problem = "is not a run directory" if path.is_dir() else "does not exist"
            raise UserError(
                f"{path} {problem}: expected a directory with {files.CONFIG} or {files.STATUS}, as `pods train` writes "
                "it."
            )
        return cls(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_mapping(self.path / files.CONFIG)

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_mapping(self.path / files.ENVIRONMENT)

    @cached_property
    def status(self) -> dict[str, Any]:
        return read_mapping(self.path / files.STATUS)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / files.METRICS, self.skipped[files.METRICS]))

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / files.EVALS, self.skipped[files.EVALS]))

    @property
    def state(self) -> str:
        """running, finished, stopped or failed; ``unknown`` if status.json is missing or damaged."""
        return str(self.status.get("state", "unknown"))

    @property
    def step(self) -> int:
        """The step in the status."""
        return int(number(self.status.get("step")))

    @property
    def seconds(self) -> float:
        """The training clock at that step."""
        return number(self.status.get("seconds"))

    @property
    def elapsed(self) -> float:
        """The wall clock at that step."""
        return number(self.status.get("elapsed"))

    @property
    def seed(self) -> int | None:
        """The seed of the recipe, or the k of a directory called ``seed-<k>``."""
        seed = self.config.get("seed")
        if isinstance(seed, int):
            return seed
        match = re.fullmatch(r"seed-(\d+)", self.path.name)
        return int(match[1]) if match else None

    @property
    def arm(self) -> str | None:
        """The arm, of a run of an experiment: ``<experiment>/<arm>/seed-<k>``."""
        path = _real(self.path)
        return path.parent.name if re.fullmatch(r"seed-\d+", path.name) else None

    @property
    def experiment(self) -> str | None:
        """The experiment that the run belongs to."""
        return _real(self.path).parent.parent.name if self.arm else None

    @property
    def name(self) -> str:
        """The directory's name; of a run of an experiment ``<experiment>-<arm>-seed-<k>``."""
        return "-".join(filter(None, (self.experiment, self.arm, _real(self.path).name)))

    def rollout_files(self) -> list[Path]:
        """The files of the ledger, by step."""
        return sorted((self.path / files.ROLLOUTS).glob("step-*.parquet"), key=step_of)

    def evaluation_files(self) -> list[Path]:
        """The completions of each evaluation, by step."""
        return sorted((self.path / files.EVALUATIONS).glob("step-*.parquet"), key=step_of)

    def checkpoints(self) -> list[Path]:
        """TRL's checkpoints, by step, without ``final/``."""
        return find_checkpoints(self.path / files.CHECKPOINTS)

    @property
    def final_checkpoint(self) -> Path | None:
        path = self.path / files.CHECKPOINTS / "final"
        return path if path.is_dir() else None


def _real(path: Path) -> Path:
    """Return the path without links; a loop of links, at which ``Path.resolve`` raises, stays as it is."""
    return Path(os.path.realpath(path))


def is_run(path: str | Path) -> bool:
    """Return whether a directory holds a run, even one that has just started."""
    return any((Path(path) / name).is_file() for name in (files.CONFIG, files.STATUS))


def find_runs(experiment_dir: str | Path) -> dict[str, list[Run]]:
    """Return every run below a directory, by arm: ``<arm>/seed-<k>/``, ``<run>/``, or the directory itself.

    Hidden directories, where an experiment keeps earlier attempts, are skipped. Arms are in the order of
    ``experiment.yaml`` if there is one, else by name; runs by seed.
    """
    root = Path(experiment_dir)
    if not root.is_dir():
        raise UserError(f"{root} does not exist: expected a directory written by `pods compare` or `pods train`.")
    if is_run(root):
        return {_real(root).name: [Run(root)]}
    arms: dict[str, list[Run]] = {}
    for child in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        paths = [child] if is_run(child) else [p for p in child.iterdir() if p.is_dir() and is_run(p)]
        if paths:
            arms[child.name] = [Run(p) for p in sorted(paths, key=lambda p: (step_of(p), p.name))]
    declared = read_mapping(root / "experiment.yaml").get("arms")
    order = [*declared] if isinstance(declared, Mapping) else []
    return {name: arms[name] for name in dict.fromkeys([*order, *arms]) if name in arms}
