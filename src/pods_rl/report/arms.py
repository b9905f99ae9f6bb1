"""The arms of a comparison: their runs and curves, and which runs are missing or damaged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..runs import Run, find_runs, is_run
from ..runs.files import CONFIG, ENVIRONMENT, EVALS, METRICS, STATUS, read_mapping
from .curves import ACCURACIES, LENGTH, Curve, curve_of, finite, other_metrics
from .text import plain

OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})
"""Keys of a recipe that runs of one arm differ in."""

AUTO = "auto"  # n of an arm whose runs planned it
_MOST_DAMAGED = 5  # files that are named


class Missing(NamedTuple):
    """A run that ``experiment.yaml`` plans and that is missing."""

    seed: int
    reason: str


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of the comparison: a name, its runs and its curve (None before a run has been evaluated)."""

    name: str
    label: str
    curve: Curve | None
    config: Mapping[str, Any]
    runs: tuple[Run, ...] = ()
    other_curves: Mapping[str, Curve] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()

    @property
    def run_count(self) -> int:
        return len(self.runs) or (len(self.curve.runs) if self.curve else 0)

    @property
    def is_single(self) -> bool:
        """Whether the curve is that of one run."""
        return self.curve is not None and self.curve.is_single

    def curves(self, metric: str) -> dict[str, Curve]:
        """By metric: the one compared first, then the other accuracies and the length."""
        others = {name: self.other_curves.get(name) for name in (*ACCURACIES, LENGTH) if name != metric}
        return {name: curve for name, curve in {metric: self.curve, **others}.items() if curve}


def arms_from_runs(sources: Sequence[str | Path], metric: str) -> list[Arm]:
    """Return the arms found in experiment directories and run directories, in the order given.

    A run directory called ``seed-<k>`` belongs to the arm its parent is named after; another is its own arm.
    """
    found: dict[str, list[Run]] = {}
    for source in sources:
        path = Path(source)
        for arm, runs in find_runs(path).items():
            alone = is_run(path) and re.fullmatch(r"seed-\d+", path.resolve().name)
            found.setdefault(path.resolve().parent.name if alone else arm, []).extend(runs)
    if not found:
        where = ", ".join(str(source) for source in sources) or "an empty list"
        raise UserError(
            f"No run found in {where}: expected run directories, or a directory of them, as `pods compare` writes it."
        )
    missing = _missing_runs(sources, found)
    arms = []
    for name in dict.fromkeys([*missing, *found]):
        runs = found.get(name, [])
        evals = {str(run.path): run.evals for run in runs}
        others = {other: curve for other in sorted(other_metrics(metric)) if (curve := curve_of(evals, other))}
        config = _config_of(runs)
        label, curve = label_of(name, config), curve_of(evals, metric)
        arms.append(Arm(name, label, curve, config, tuple(runs), others, missing.get(name, ())))
    return arms


def _config_of(runs: Sequence[Run]) -> Mapping[str, Any]:
    """Return the recipe of an arm's first run; n is auto, and m null, where plans gave the runs different ones."""
    configs = [run.config for run in runs if run.config]
    if not configs:
        return {}
    planned = any(run.plan for run in runs)
    if not planned or len({rollouts_of(config) for config in configs}) == 1:
        return configs[0]
    same = len({rollouts_of(config)[1] for config in configs}) == 1
    return configs[0] | {"num_rollouts": AUTO} | ({} if same else {"num_generations": None})


def label_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the arm's name with n and m, unless the name has n already: ``pods (64→16)``.

    >>> label_of("pods", {"num_rollouts": 64, "num_generations": 16})
    'pods (64→16)'
    >>> label_of("pods-n64-m16", {"num_rollouts": 64, "num_generations": 16})
    'pods-n64-m16'
    >>> label_of("pods", {"num_rollouts": "auto", "num_generations": 16})
    'pods (planned)'
    """
    n, m = rollouts_of(config)
    label = plain(name, limit=40) or "(no name)"
    if config.get("num_rollouts") == AUTO:
        return f"{label} (planned)"
    if n is None or m is None or re.search(rf"\b[a-z]?{n}\b", name):
        return label
    return f"{label} ({n}→{m})" if n != m else f"{label} ({n})"


def plans_of(arm: Arm) -> str | None:
    """Return in a sentence what plans chose for each run of an arm, and when they changed it; None: n was given."""
    chosen: dict[str, list[str]] = {}
    for run in arm.runs:
        again = run.plan.get("again")
        plans: list[tuple[Any, Any]] = [(0, run.plan.get("label"))]
        for one in again if isinstance(again, list) else ():
            plans += [(one.get("step"), one.get("label"))] if isinstance(one, Mapping) else []
        changes = [plan for before, plan in zip([(0, None), *plans], plans, strict=False) if plan[1] != before[1]]
        text = ", ".join(f"{f'after step {step} ' if step else ''}{plain(label)}" for step, label in changes)
        if text:
            chosen.setdefault(text, []).append(plain(run.path.name))
    parts = (f"{text} ({', '.join(names)})" for text, names in chosen.items())
    return f"{arm.label}: planned {'; '.join(parts)}." if chosen else None


def rollouts_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return n and m of a recipe; n is m if it sets no ``num_rollouts`` (plain GRPO), and None if it was planned."""
    m = finite(config.get("num_generations"))
    n = finite(config.get("num_rollouts"))
    n = m if n is None and config.get("num_rollouts") != AUTO else n
    return (None if n is None else int(n)), (None if m is None else int(m))


def _missing_runs(sources: Sequence[str | Path], found: Mapping[str, Sequence[Run]]) -> dict[str, tuple[Missing, ...]]:
    """The seeds without a run, for each arm of the ``experiment.yaml`` of the sources, in its order."""
    missing: dict[str, tuple[Missing, ...]] = {}
    for source in map(Path, sources):
        for arm, seeds in _planned_seeds(source / "experiment.yaml").items():
            there = {run.path.resolve() for run in found.get(arm, [])}
            paths = {seed: source / arm / f"seed-{seed}" for seed in seeds}
            absent = (
                Missing(seed, "its directory holds no run" if path.is_dir() else "never started")
                for seed, path in paths.items()
                if path.resolve() not in there
            )
            missing[arm] = (*missing.get(arm, ()), *absent)
    return missing


def _planned_seeds(path: Path) -> dict[str, list[int]]:
    """Return the seeds by arm; none if the file is missing or is not a plan."""
    values = read_mapping(path)
    arms, seeds = values.get("arms"), values.get("seeds", 1)
    if isinstance(seeds, int):
        seeds = range(1, seeds + 1)
    if not isinstance(arms, dict) or not isinstance(seeds, (list, range)):
        return {}
    whole = [seed for seed in seeds if isinstance(seed, int) and not isinstance(seed, bool)]
    return {name: whole for name in arms if isinstance(name, str)}


def earlier_attempts(sources: Sequence[str | Path]) -> int:
    """Count the runs that failed or were stopped and made again: kept in ``.attempts``, and in no figure."""
    return sum(path.is_dir() for source in sources for path in (Path(source) / ".attempts").glob("*"))


def damaged_files(arms: Sequence[Arm], metrics: Collection[str]) -> str:
    """Name the files of the runs with lines or values that were skipped, and which; empty if there are none.

    Args:
        metrics: the fields that are read of an evaluation, besides its times.
    """
    clock = ("step", "seconds", "elapsed")
    found = []
    for arm in arms:
        for run in arm.runs:
            files = (
                (CONFIG, [run.config], ("num_rollouts", "num_generations", "seed")),
                (STATUS, [run.status], clock),
                (ENVIRONMENT, [run.environment], ()),
                (METRICS, run.metrics, clock),
                (EVALS, run.evals, ("step", "due", "seconds", "elapsed", *metrics)),
            )
            for name, rows, numbers in files:
                parts = _not_numbers(rows, numbers)
                if lines := run.skipped.get(name):
                    parts.insert(0, f"{len(lines)} line{'s' * (len(lines) > 1)} from {lines[0]}")
                if rows == [{}] and (run.path / name).is_file():
                    parts = ["all of it"]
                if parts:
                    found.append(f"{plain(arm.name)}/{plain(run.path.name)}/{name} ({'; '.join(parts)})")
    more = f", and {len(found) - _MOST_DAMAGED} more files" if len(found) > _MOST_DAMAGED else ""
    return ", ".join(found[:_MOST_DAMAGED]) + more


def _not_numbers(rows: Sequence[Mapping[str, Any]], keys: Collection[str]) -> list[str]:
    """``step [1], 2 times``: the values that should be numbers, by key, each with an example; null is missing."""
    count: Counter[str] = Counter()
    example: dict[str, object] = {}
    for row in rows:
        for key in keys:
            value = row.get(key)
            if value is not None and finite(value) is None and (key, value) != ("num_rollouts", AUTO):
                count[key] += 1
                example.setdefault(key, value)
    return [f"{key} {plain(repr(example[key]), 20)}, {times} time{'s' * (times > 1)}" for key, times in count.items()]
