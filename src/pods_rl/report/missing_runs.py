"""The runs that an experiment planned and that are not there, and the attempts that were made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from ..runs import Run

_ATTEMPTS = ".attempts"


class Missing(NamedTuple):
    """A run that ``experiment.yaml`` asks for."""

    seed: int
    reason: str


def missing_runs(sources: Sequence[str | Path], found: Mapping[str, Sequence[Run]]) -> dict[str, tuple[Missing, ...]]:
    """For each arm that an ``experiment.yaml`` of the sources names, in its order: its seeds without a run.

    Args:
        sources: experiment directories; one without ``experiment.yaml``, or whose file is no plan, plans nothing.
        found: the runs there are, by arm.
    """
    missing: dict[str, tuple[Missing, ...]] = {}
    for source in map(Path, sources):
        for arm, seeds in _plan(source / "experiment.yaml").items():
            there = {run.path.resolve() for run in found.get(arm, [])}
            paths = {seed: source / arm / f"seed-{seed}" for seed in seeds}
            absent = [Missing(seed, _why(path)) for seed, path in paths.items() if path.resolve() not in there]
            missing[arm] = (*missing.get(arm, ()), *absent)
    return missing


def _why(path: Path) -> str:
    return "its directory holds no run" if path.is_dir() else "never started"


def _plan(path: Path) -> dict[str, list[int]]:
    """Seeds by arm, as far as the file says them."""
    try:
        values = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(values, dict):
        return {}
    arms, seeds = values.get("arms"), values.get("seeds", 1)
    if isinstance(seeds, int):
        seeds = range(1, seeds + 1)
    if not isinstance(arms, dict) or not isinstance(seeds, (list, range)):
        return {}
    whole = [seed for seed in seeds if isinstance(seed, int) and not isinstance(seed, bool)]
    return {name: whole for name in arms if isinstance(name, str)}


def earlier_attempts(sources: Sequence[str | Path]) -> int:
    """Runs that failed or were stopped and made again: kept, hidden, and in no figure."""
    return sum(1 for source in sources for path in (Path(source) / _ATTEMPTS).glob("*") if path.is_dir())
