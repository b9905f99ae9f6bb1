"""The arms of a comparison and their curves, from run directories or from a CSV of evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs import Run, find_runs, is_run
from .curves import ACCURACIES, LENGTH, Curve, curve_of, finite, other_metrics
from .evaluations_csv import read_evaluations
from .missing_runs import Missing, missing_runs
from .text import plain

OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})
"""Keys of a recipe that runs of one arm differ in."""


@dataclass(frozen=True, eq=False)
class Arm:
    """What is compared: a name, its runs and its curve (None before a run has been evaluated)."""

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

    def curves(self, metric: str) -> dict[str, Curve]:
        """By metric: the one compared first, then the other accuracies and the length."""
        others = {name: self.other_curves.get(name) for name in (*ACCURACIES, LENGTH) if name != metric}
        return {name: curve for name, curve in {metric: self.curve, **others}.items() if curve}


def arms_from_runs(sources: Sequence[str | Path], metric: str) -> list[Arm]:
    """The arms found in experiment directories and run directories, in the order given.

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
    missing = missing_runs(sources, found)
    order = [*missing, *(name for name in found if name not in missing)]
    return [_arm(name, found.get(name, []), metric, missing.get(name, ())) for name in order]


def _arm(name: str, runs: Sequence[Run], metric: str, missing: tuple[Missing, ...]) -> Arm:
    evals = {str(run.path): run.evals for run in runs}
    curves = {other: curve for other in sorted(other_metrics(metric)) if (curve := curve_of(evals, other))}
    config = next((run.config for run in runs if run.config), {})
    return Arm(name, label_of(name, config), curve_of(evals, metric), config, tuple(runs), curves, missing)


def curves_from_csv(path: str | Path, metric: str = "answer_accuracy") -> dict[str, Curve]:
    """Curves by arm from a CSV with a row per run and checkpoint.

    Args:
        path: columns ``arm``, ``run``, ``hours`` (nominal, also taken as the real time), and the metric; where there,
            ``<metric>_se``, the standard error of an evaluation, or ``prompts``, how many it was over.
        metric: the column to read; a row with nothing there is skipped.

    Raises:
        UserError: for a missing file or column, for an hour or a score that is not a number, and where a run has two
            rows at the same hour (two benchmarks in one file, for instance).
    """
    arms = read_evaluations(path, metric)
    return {arm: curve for arm, rows in arms.items() if (curve := rows.curve(metric))}


def arms_from_csv(path: str | Path, metric: str = "answer_accuracy") -> list[Arm]:
    """The arms of a CSV (``curves_from_csv``), described by ``rule``, ``n``, ``m`` and ``advantages``, if any."""
    arms = []
    for name, rows in read_evaluations(path, metric).items():
        others = sorted(other_metrics(metric) & {*rows.values})
        curves = {key: curve for key in others if (curve := rows.curve(key))}
        arms.append(Arm(name, label_of(name, rows.config), rows.curve(metric), rows.config, other_curves=curves))
    return arms


def label_of(name: str, config: Mapping[str, Any]) -> str:
    """The arm's name with n and m, where its name does not say them: ``pods (64→16)``.

    >>> label_of("pods", {"num_rollouts": 64, "num_generations": 16})
    'pods (64→16)'
    >>> label_of("pods-n64-m16", {"num_rollouts": 64, "num_generations": 16})
    'pods-n64-m16'
    """
    n, m = rollouts_of(config)
    label = plain(name, limit=40) or "(no name)"
    if n is None or m is None or re.search(rf"\b[a-z]?{n}\b", name):
        return label
    return f"{label} ({n}→{m})" if n != m else f"{label} ({n})"


def rollouts_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """n and m of a recipe; n is m where the recipe sets no ``num_rollouts`` (plain GRPO)."""
    m = finite(config.get("num_generations"))
    n = finite(config.get("num_rollouts"))
    n = m if n is None else n
    return (None if n is None else int(n)), (None if m is None else int(m))
