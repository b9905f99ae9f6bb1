"""The arms of a comparison and their curves, from run directories or from a CSV of evaluations."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..runs import Run, find_runs, is_run
from .planned import Missing, missing_runs
from .statistics import Array, mean_curve
from .text import plain

HOUR = 3600.0
OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})
"""Keys of a recipe that runs of one arm differ in."""

ACCURACIES = ("answer_accuracy", "accuracy", "format_accuracy", "both_accuracy")
LENGTH = "mean_completion_tokens"


@dataclass(frozen=True, eq=False)
class Curve:
    """One arm's evaluations: R runs, C checkpoints aligned by their nominal second."""

    runs: tuple[str, ...]
    due: Array  # [C] nominal seconds
    seconds: Array  # [R, C] real seconds of training clock; NaN where a run has no such checkpoint
    scores: Array  # [R, C]

    @cached_property
    def mean(self) -> Array:
        return mean_curve(self.scores)

    @property
    def has_mean(self) -> bool:
        """Whether most of the runs share a checkpoint; else there is nothing to compare."""
        return not bool(np.isnan(self.mean).all())

    @cached_property
    def times(self) -> Array:
        """Mean of the real seconds over runs."""
        return mean_curve(self.seconds)

    def last(self, horizon: float = math.inf) -> int:
        """The last checkpoint with a mean, no later than ``horizon`` nominal seconds; else the first."""
        usable = np.flatnonzero(~np.isnan(self.mean) & (self.due <= horizon * (1 + 1e-9)))
        return int(usable[-1]) if len(usable) else 0


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


def curve_of(evals: Mapping[str, Iterable[Mapping[str, Any]]], metric: str) -> Curve | None:
    """The curve of one metric over the runs of an arm.

    Args:
        evals: evaluations by run, each with ``due`` (nominal seconds), ``seconds`` (real) and the metric.
        metric: the field to read; an evaluation without a finite number there is passed over.

    Returns:
        Rows only for runs that have an evaluation; None where none has. Of two evaluations of one run with
        the same ``due`` (a resumed run repeats one) the later line counts. Without ``due`` the real seconds
        stand for it.

    >>> curve_of({"0": [{"due": 0, "seconds": 0.1, "accuracy": 0.2}], "1": []}, "accuracy").scores
    array([[0.2]])
    """
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for run, rows in evals.items():
        for row in rows:
            score, seconds = finite(row.get(metric)), finite(row.get("seconds"))
            due = finite(row.get("due"))
            due = seconds if due is None else due
            if score is not None and due is not None:
                points.setdefault(run, {})[due] = (due if seconds is None else seconds, score)
    if not points:
        return None
    due_C = sorted({due for row in points.values() for due in row})
    missing = (math.nan, math.nan)
    grid = np.array([[row.get(due, missing) for due in due_C] for row in points.values()], dtype=np.float64)
    return Curve(tuple(points), np.array(due_C, dtype=np.float64), grid[..., 0], grid[..., 1])


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
    curves = {other: curve for other in sorted(_others(metric)) if (curve := curve_of(evals, other))}
    config = next((run.config for run in runs if run.config), {})
    return Arm(name, label_of(name, config), curve_of(evals, metric), config, tuple(runs), curves, missing)


def _others(metric: str) -> set[str]:
    return {*ACCURACIES, LENGTH} - {metric}


def curves_from_csv(path: str | Path, metric: str = "answer_accuracy") -> dict[str, Curve]:
    """Curves by arm from a CSV with a row per run and checkpoint.

    Args:
        path: columns ``arm``, ``run``, ``hours`` (nominal, also taken as the real time), and the metric.
        metric: the column to read; a row with nothing there is passed over.

    Raises:
        UserError: for a missing file or column, for an hour or a score that is no number, and where a run has two rows
            at the same hour (two benchmarks in one file, for instance).
    """
    arms = _csv_rows(path, metric)
    return {arm: curve for arm, rows in arms.items() if (curve := _csv_curve(rows, metric))}


_CSV_SETTINGS = (("rule", "rule"), ("num_rollouts", "n"), ("num_generations", "m"), ("advantages", "advantages"))


def arms_from_csv(path: str | Path, metric: str = "answer_accuracy") -> list[Arm]:
    """The arms of a CSV (``curves_from_csv``), described by ``rule``, ``n``, ``m`` and ``advantages``, if any."""
    arms = []
    for name, rows in _csv_rows(path, metric).items():
        first = rows[0]
        config = {key: first[column] for key, column in _CSV_SETTINGS if first.get(column)}
        others = _others(metric) & set(first)
        curves = {key: curve for key in sorted(others) if (curve := _csv_curve(rows, key))}
        arms.append(Arm(name, label_of(name, config), _csv_curve(rows, metric), config, other_curves=curves))
    return arms


_NOT_MEASURED = ("", "nan", "na", "n/a", "null", "none", "-")  # as spreadsheets and data frames write it


def _csv_rows(path: str | Path, metric: str) -> dict[str, list[dict[str, str]]]:
    wanted = ["arm", "run", "hours", metric]
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or [])
            rows = [{key: value for key, value in row.items() if isinstance(key, str)} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        expected = ", ".join(wanted)
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {expected}.") from error
    missing = [column for column in wanted if column not in columns]
    if missing or not rows:
        raise UserError(
            f"{path} has {len(rows)} rows and columns {', '.join(columns) or 'none'}: "
            f"expected rows with {', '.join(wanted)}. Choose a metric with --metric, or rename the columns."
        )
    seen: set[tuple[str, str, float]] = set()
    arms: dict[str, list[dict[str, str]]] = {}
    for line, row in enumerate(rows, start=2):
        hours = finite(row["hours"])
        if hours is None:
            raise UserError(f"{path}, line {line}: hours is {row['hours']!r}, expected a number.")
        if finite(row[metric]) is None and (row[metric] or "").strip().lower() not in _NOT_MEASURED:
            raise UserError(
                f"{path}, line {line}: {metric} is {row[metric]!r}, expected a number, or nothing where it was not "
                "measured."
            )
        row["arm"], row["run"] = row["arm"] or "", row["run"] or ""  # a short line leaves None
        key = (row["arm"], row["run"], hours)
        if key in seen:
            raise UserError(
                f"{path}, line {line}: run {row['run']} of arm {row['arm']} has a second row at {hours} h. "
                "Keep one row per run and checkpoint (one benchmark per file)."
            )
        seen.add(key)
        arms.setdefault(row["arm"], []).append(row)
    return arms


def _csv_curve(rows: Iterable[Mapping[str, str]], metric: str) -> Curve | None:
    evals: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        seconds = (finite(row["hours"]) or 0.0) * HOUR
        evals.setdefault(row["run"], []).append({"due": seconds, "seconds": seconds, metric: row[metric]})
    return curve_of(evals, metric)


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


def finite(value: object) -> float | None:
    """A finite number, or None: what a log holds may be null, text or not finite.

    >>> finite("0.5"), finite(None), finite("x"), finite(float("nan")), finite(True)
    (0.5, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
