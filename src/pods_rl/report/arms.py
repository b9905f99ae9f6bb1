"""The arms of a comparison, from run directories or a CSV, and which runs are missing or damaged."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs import Run, find_runs, is_run
from ..runs.files import CONFIG, ENVIRONMENT, EVALS, METRICS, STATUS, read_mapping
from .curves import ACCURACIES, HOUR, LENGTH, Curve, curve_of, finite
from .text import plain

OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})
"""Keys of a recipe that runs of one arm differ in."""

_METRICS = (*ACCURACIES, LENGTH)
_CSV_SETTINGS = {"rule": "rule", "num_rollouts": "n", "num_generations": "m", "advantages": "advantages"}
_NOT_MEASURED = ("", "nan", "na", "n/a", "null", "none", "-")  # as spreadsheets and data frames write it
_MOST_ARMS = 256  # with more, the column does not name arms
_MOST_DAMAGED = 5  # files that are named

Evals = Mapping[str, Sequence[Mapping[str, Any]]]  # by run


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of the comparison: a name, its runs and its curve (None before a run has been evaluated)."""

    name: str
    label: str
    curve: Curve | None
    config: Mapping[str, Any]
    runs: tuple[Run, ...] = ()
    other_curves: Mapping[str, Curve] = field(default_factory=dict)
    missing: int = 0  # runs that ``experiment.yaml`` plans and that have not begun

    @property
    def run_count(self) -> int:
        return len(self.runs) or (len(self.curve.runs) if self.curve else 0)

    @property
    def is_single(self) -> bool:
        """Whether the curve is that of one run."""
        return self.curve is not None and self.curve.is_single

    def curves(self, metric: str) -> dict[str, Curve]:
        """Return the curves by metric: the compared one first, then the other accuracies and the length."""
        others = {name: self.other_curves.get(name) for name in _METRICS if name != metric}
        return {name: curve for name, curve in {metric: self.curve, **others}.items() if curve}


def real(path: str | Path) -> Path:
    """Return the absolute path without links; a loop of links, at which ``Path.resolve`` raises, stays as it is."""
    return Path(os.path.realpath(path))


def arms_from_runs(sources: Sequence[str | Path], metric: str) -> list[Arm]:
    """Return the arms found in experiment directories and run directories, in the order given.

    A run directory called ``seed-<k>`` belongs to the arm its parent is named after; another is its own arm.
    """
    found: dict[str, list[Run]] = {}
    for source in sources:
        path = Path(source)
        for arm, runs in find_runs(path).items():
            alone = is_run(path) and re.fullmatch(r"seed-\d+", real(path).name)
            found.setdefault(real(path).parent.name if alone else arm, []).extend(runs)
    if not found:
        where = ", ".join(str(source) for source in sources) or "an empty list"
        raise UserError(
            f"No run found in {where}: expected run directories, or a directory of them, as `pods compare` writes it."
        )
    planned = _planned(sources)
    arms = []
    for name in dict.fromkeys([*planned, *found]):
        runs = found.get(name, [])
        config = next((run.config for run in runs if run.config), {})
        missing = max(0, planned.get(name, 0) - len(runs))
        arms.append(_arm(name, config, {str(run.path): run.evals for run in runs}, metric, runs, missing))
    return arms


def _arm(
    name: str, config: Mapping[str, Any], evals: Evals, metric: str, runs: Sequence[Run] = (), missing: int = 0
) -> Arm:
    others = {other: curve for other in sorted({*_METRICS} - {metric}) if (curve := curve_of(evals, other))}
    return Arm(name, label_of(name, config), curve_of(evals, metric), config, tuple(runs), others, missing)


def arms_from_csv(path: str | Path, metric: str = "answer_accuracy") -> list[Arm]:
    """Return the arms of a CSV with a row per run and checkpoint, in the order in which they first appear.

    Args:
        path: columns ``arm``, ``run``, ``hours`` (nominal, also taken as the real time), and the metric; optional,
            ``<metric>_se``, the standard error of an evaluation, or ``prompts``, how many it was over; ``rule``,
            ``n``, ``m`` and ``advantages`` describe an arm.
        metric: the column to read; a row with nothing there is skipped.

    Raises:
        UserError: for a missing file or column, for an hour or a score that is not a number of at most 15 digits, and
            where a run has two rows at the same hour (two benchmarks in one file, for instance).
    """
    needed = ["arm", "run", "hours", metric]
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is not a regular file")
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, restval="")
            columns = rows.fieldnames or ()
            evals, configs = _read_rows(path, rows, metric) if {*needed} <= {*columns} else ({}, {})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {', '.join(needed)}.") from error
    if not evals:
        held = "no rows" if {*needed} <= {*columns} else f"columns {', '.join(columns)}" if columns else "no columns"
        raise UserError(
            f"{path} has {held}: expected rows with {', '.join(needed)}. Choose a metric with --metric, or rename the "
            "columns."
        )
    return [_arm(name, configs[name], evals[name], metric) for name in evals]


def _read_rows(
    path: str | Path, rows: csv.DictReader[str], metric: str
) -> tuple[dict[str, dict[str, list[dict[str, Any]]]], dict[str, dict[str, str]]]:
    """Return the evaluations by arm and run, and the settings of each arm."""
    shown = ("prompts", *(name for one in {metric, *_METRICS} for name in (one, f"{one}_se")))
    evals: dict[str, dict[str, list[dict[str, Any]]]] = {}
    configs: dict[str, dict[str, str]] = {}
    seen = set()
    for row in rows:
        name, run, hours = row["arm"], row["run"], finite(row["hours"])
        if hours is None:
            raise UserError(f"{path}, line {rows.line_num}: hours is {row['hours'][:60]!r}, expected a number.")
        if finite(row[metric]) is None and row[metric].strip().lower() not in _NOT_MEASURED:
            raise UserError(
                f"{path}, line {rows.line_num}: {metric} is {row[metric][:60]!r}, expected a number, or nothing if it "
                "was not measured."
            )
        if name not in evals:
            if len(evals) == _MOST_ARMS:
                raise UserError(
                    f"{path} has more than {_MOST_ARMS} arms, such as {name!r}. The column arm must hold the name of "
                    "an arm, the same for all of its runs."
                )
            configs[name] = {key: row[column] for key, column in _CSV_SETTINGS.items() if row.get(column)}
        if (name, run, hours) in seen:
            raise UserError(
                f"{path}, line {rows.line_num}: run {run} of arm {name} has a second row at {hours} h. Keep one row "
                "per run and checkpoint (one benchmark per file)."
            )
        seen.add((name, run, hours))
        values = {key: row[key] for key in shown if row.get(key)}
        evals.setdefault(name, {}).setdefault(run, []).append(values | {"seconds": hours * HOUR})
    return evals, configs


def label_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the arm's name with n and m, unless the name has n already.

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
    """Return n and m of a recipe; n is m if it sets no ``num_rollouts`` (plain GRPO)."""
    m = finite(config.get("num_generations"))
    n = finite(config.get("num_rollouts"))
    n = m if n is None else n
    return (None if n is None else int(n)), (None if m is None else int(m))


def _planned(sources: Sequence[str | Path]) -> dict[str, int]:
    """Return the number of runs that the ``experiment.yaml`` of each source plans, by arm, in its order."""
    planned: Counter[str] = Counter()
    for source in sources:
        values = read_mapping(Path(source) / "experiment.yaml")
        arms, seeds = values.get("arms"), values.get("seeds", 1)
        count = len(seeds) if isinstance(seeds, list) else seeds
        if isinstance(arms, dict) and isinstance(count, int):
            planned.update({name: count for name in arms if isinstance(name, str)})
    return planned


def damaged_files(arms: Sequence[Arm], metrics: Collection[str]) -> str:
    """Name the files of the runs with lines or values that were skipped; empty if there are none.

    Args:
        metrics: the fields that are read of an evaluation, next to its times.
    """
    clock = ("step", "seconds", "elapsed")
    found = []
    for run in (run for arm in arms for run in arm.runs):
        files: tuple[tuple[str, Sequence[Mapping[str, Any]], tuple[str, ...]], ...] = (
            (CONFIG, [run.config], ("num_rollouts", "num_generations", "seed")),
            (STATUS, [run.status], clock),
            (ENVIRONMENT, [run.environment], ()),
            (METRICS, run.metrics, clock),
            (EVALS, run.evals, ("due", *clock, *metrics)),
        )
        for name, rows, numbers in files:
            path, parts = run.path / name, [f"line {line}" for line in run.skipped.get(name, [])[:1]]
            wrong = Counter(k for k in numbers for row in rows if row.get(k) is not None and finite(row[k]) is None)
            parts += [f"{key} is not a number in {count}" for key, count in wrong.items()]
            if os.path.lexists(path) and (rows == [{}] or not path.is_file()):
                parts = ["all of it"]
            if parts:
                place = "/".join(map(plain, (run.path.parent.name, run.path.name, name)))
                found.append(f"{place} ({'; '.join(parts)})")
    more = f", and {len(found) - _MOST_DAMAGED} more files" if len(found) > _MOST_DAMAGED else ""
    return ", ".join(found[:_MOST_DAMAGED]) + more
