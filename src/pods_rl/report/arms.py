"""The arms of a comparison and their curves, from run directories or a CSV, and which runs are missing or damaged."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

from ..errors import UserError
from ..runs import Run, find_runs, is_run
from ..runs.files import CONFIG, ENVIRONMENT, EVALS, METRICS, STATUS
from .intervals import Array
from .pooling import pools_of
from .statistics import Evaluations, mean_curve
from .text import finite, plain

ACCURACIES = ("accuracy", "answer_accuracy", "both_accuracy", "format_accuracy")
LENGTH = "mean_completion_tokens"
HOUR = 3600.0

MOST_CHECKPOINTS = 1000  # of a curve; a longer one keeps this many, evenly spread
_METRICS = (*ACCURACIES, LENGTH)
_CSV_SETTINGS = {"rule": "rule", "num_rollouts": "n", "num_generations": "m", "advantages": "advantages"}
# as spreadsheets and data frames write it
_NOT_MEASURED = ("", "nan", "NaN", "na", "NA", "n/a", "N/A", "null", "none", "None", "-")
_MOST_DAMAGED = 5  # files that are named

Evals = Mapping[str, Iterable[Mapping[str, Any]]]  # by run
Points = dict[float, tuple[float, float, float]]  # by nominal second: real second, score, standard error


@dataclass(frozen=True, eq=False)
class Curve:
    """One arm's evaluations: R runs, C checkpoints aligned by their nominal second."""

    runs: tuple[str, ...]
    due: Array  # [C] nominal seconds
    seconds: Array  # [R, C] real seconds of training clock; NaN if a run has no such checkpoint
    scores: Array  # [R, C]
    errors: Array  # [R, C] standard error of each evaluation; NaN if it is not known
    interpolated: bool = False  # each run was evaluated at its own times

    @cached_property
    def mean(self) -> Array:
        return mean_curve(self.scores)

    @cached_property
    def times(self) -> Array:
        """Mean of the real seconds over runs."""
        return mean_curve(self.seconds)

    @property
    def evaluations(self) -> Evaluations:
        return Evaluations(self.scores, self.seconds, self.errors, self.due)

    def last(self, horizon: float = math.inf) -> int | None:
        """Return the last checkpoint with a mean, no later than ``horizon`` nominal seconds; None if there is none."""
        usable = np.flatnonzero(~np.isnan(self.mean) & (self.due <= horizon * (1 + 1e-9)))
        return int(usable[-1]) if len(usable) else None

    @property
    def end(self) -> float:
        """Nominal seconds of the last checkpoint with a mean; NaN if there is none."""
        at = self.last()
        return math.nan if at is None else float(self.due[at])

    def at(self, due: float) -> tuple[Array, Array]:
        """Return score and standard error of each run at a nominal second, each ``[R]``.

        Between two checkpoints, both are on a straight line, also where few runs have the checkpoint: a slow step
        passes over one. A run that has not begun or has ended has NaN.
        """
        exact = np.flatnonzero(np.isclose(self.due, due, rtol=1e-9, atol=1e-9))
        if len(exact) and not np.isnan(self.mean[exact[0]]):
            return self.scores[:, exact[0]], self.errors[:, exact[0]]
        scores = [_on_a_line(due, self.due, row) for row in self.scores]
        errors = [_on_a_line(due, self.due, row) for row in self.errors]
        return np.array(scores), np.array(errors)


def _on_a_line(due: float, times: Array, values: Array) -> float:
    known = ~np.isnan(values)
    if not known.any():
        return math.nan
    return float(np.interp(due, times[known], values[known], left=math.nan, right=math.nan))


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of the comparison: a name, its runs and its curve (None before a run has been evaluated)."""

    name: str
    label: str
    curve: Curve | None
    config: Mapping[str, Any]
    runs: tuple[Run, ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by metric, the compared one first

    @property
    def run_count(self) -> int:
        return len(self.runs) or (len(self.curve.runs) if self.curve else 0)

    @property
    def is_single(self) -> bool:
        """Whether the curve is that of one run."""
        return self.curve is not None and len(self.curve.runs) == 1

    @property
    def unfinished(self) -> str:
        """How many runs did not finish, by state, such as ``1 failed``; empty if all finished."""
        states = Counter(plain(run.state, limit=20) for run in self.runs if run.state != "finished")
        return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))

    @cached_property
    def seeds(self) -> tuple[str, ...]:
        """The seed of each run of the curve, or the run's name if its seed is unknown."""
        known = {str(run.path): str(run.seed) for run in self.runs if run.seed is not None}
        return tuple(known.get(name, name) for name in self.curve.runs) if self.curve else ()


def same_seeds(arm: Arm, other: Arm) -> list[int] | None:
    """Return the rows of the other's curve in the order of the arm's seeds; None if their seeds are not the same."""
    if len({*other.seeds}) < len(other.seeds) or sorted(arm.seeds) != sorted(other.seeds):
        return None
    return [other.seeds.index(seed) for seed in arm.seeds]


# --------------------------------------------------------------------------------------------- curves


def curve_of(evals: Evals, metric: str, clock: str = "seconds") -> Curve | None:
    """Return the curve of one metric over the runs of an arm. If no run has an evaluation, return None.

    Args:
        evals: evaluations by run, each with ``due`` (nominal seconds), ``seconds`` (real), the metric and, if it is
            known, its standard error ``<metric>_se`` or the number of ``prompts``. Of two evaluations of one run with
            the same ``due`` (a resumed run repeats one) the later line counts. ``due`` defaults to ``seconds``.
        metric: the field to read; an evaluation without a finite number there is skipped.
        clock: the field of the real times.

    >>> curve_of({"0": [{"due": 0, "seconds": 0.1, "accuracy": 0.2}], "1": []}, "accuracy").scores
    array([[0.2]])
    """
    runs: dict[str, Points] = {}
    for run, rows in evals.items():
        for row in rows:
            score, seconds, due = (finite(row.get(key)) for key in (metric, clock, "due"))
            due = seconds if due is None else due
            if score is not None and due is not None:
                values = (due if seconds is None else seconds, score, standard_error(row, metric))
                runs.setdefault(run, {})[due] = values
    if not runs:
        return None
    if not _share_a_clock([*runs.values()]) and (found := _interpolated(runs)):
        return found
    all_due = sorted(set().union(*runs.values()))
    kept = np.linspace(0, len(all_due) - 1, min(len(all_due), MOST_CHECKPOINTS)).round().astype(int)
    place = {all_due[index]: column for column, index in enumerate(kept)}
    table = np.full((3, len(runs), len(kept)), np.nan)
    for row_of_run, points in enumerate(runs.values()):
        for due, values in points.items():
            if due in place:
                table[:, row_of_run, place[due]] = values
    return Curve(tuple(runs), np.array([*place], dtype=np.float64), *table)


def standard_error(row: Mapping[str, Any], metric: str) -> float:
    """Return the standard error of an evaluation: as given, else that of a share of its prompts, else NaN.

    Two answers, one right, are added to the prompts (Agresti and Coull 1998): 0 of 256 does not prove 0.

    >>> round(standard_error({"accuracy": 0.5, "prompts": 98}, "accuracy"), 3)
    0.05
    """
    score, given, prompts = (finite(row.get(key)) or 0.0 for key in (metric, f"{metric}_se", "prompts"))
    if given > 0:
        return given
    if metric not in ACCURACIES or prompts < 1 or not 0 <= score <= 1:
        return math.nan
    share = (score * prompts + 1) / (prompts + 2)
    return math.sqrt(share * (1 - share) / (prompts + 2))


def _share_a_clock(runs: Sequence[Points]) -> bool:
    """Whether some run has at least half of its evaluations at times at which another run has one too.

    Evaluations at the earliest time do not count: all runs start at 0.
    """
    start = min(map(min, runs))
    own = [times for points in runs if (times := points.keys() - {start})]
    count = Counter(time for times in own for time in times)
    shared = (sum(count[time] > 1 for time in times) / len(times) for times in own)
    return len(own) < 2 or any(share >= 0.5 for share in shared)


def _interpolated(runs: Mapping[str, Points]) -> Curve | None:
    """Interpolate linearly at common times, about one for each evaluation of a run, without extrapolation.

    The times lie between the start of most runs and the end of most runs. If there are none, return None.
    """
    tables = [np.array(sorted(points.values())).T for points in runs.values()]
    half = len(tables) // 2
    low = sorted(table[0, 0] for table in tables)[half]
    high = sorted((table[0, -1] for table in tables), reverse=True)[half]
    seconds = np.concatenate([table[0] for table in tables])
    within = seconds[(seconds >= low) & (seconds <= high)]
    if low >= high:
        return None
    count = min(int(np.median([table.shape[1] for table in tables])), MOST_CHECKPOINTS)
    grid = np.unique(np.quantile(within, np.linspace(0, 1, max(2, count))))
    scores, errors = (
        np.array([np.interp(grid, table[0], table[row], left=np.nan, right=np.nan) for table in tables])
        for row in (1, 2)
    )
    return Curve(tuple(runs), grid, np.where(np.isnan(scores), np.nan, grid), scores, errors, interpolated=True)


# ----------------------------------------------------------------------------------------------- arms


def arms_from_runs(sources: Sequence[str | Path], metric: str) -> list[Arm]:
    """Return the arms found in experiment directories and run directories, in the order given.

    A run directory called ``seed-<k>`` belongs to the arm its parent is named after, as in an experiment. Only runs of
    one recipe, which differ in the seed, become one arm: runs of several recipes under one name become several arms,
    whose names tell what differs. A directory that is given twice counts once.
    """
    found: dict[str, list[Run]] = {}
    seen: set[str] = set()
    for source in map(Path, sources):
        for folder, runs in find_runs(source).items():
            name = (is_run(source) and runs[0].arm) or folder
            for run in runs:
                place = os.path.realpath(run.path)
                if place not in seen:
                    seen.add(place)
                    found.setdefault(name, []).append(run)
    if not found:
        where = ", ".join(str(source) for source in sources) or "an empty list"
        raise UserError(
            f"No run found in {where}: expected run directories, or a directory of them, as `pods compare` writes it."
        )
    arms = []
    for name, runs in pools_of(found).items():
        config = {str(key): value for key, value in next((run.config for run in runs if run.config), {}).items()}
        arms.append(_arm(name, config, {str(run.path): run.evals for run in runs}, metric, runs))
    return arms


def _arm(name: str, config: Mapping[str, Any], evals: Evals, metric: str, runs: Sequence[Run] = ()) -> Arm:
    curves = {one: curve for one in dict.fromkeys((metric, *_METRICS)) if (curve := curve_of(evals, one))}
    return Arm(name, label_of(name, config), curves.get(metric), config, tuple(runs), curves)


def arms_from_csv(path: str | Path, metric: str = "answer_accuracy") -> list[Arm]:
    """Return the arms of a CSV with a row per run and checkpoint, in the order in which they first appear.

    Args:
        path: columns ``arm``, ``run``, ``hours`` (nominal, also taken as the real time), and the metric; optional,
            ``<metric>_se``, the standard error of an evaluation, or ``prompts``, how many it was over; ``rule``,
            ``n``, ``m`` and ``advantages`` describe an arm.
        metric: the column to read; a row with nothing there is skipped.

    Raises:
        UserError: if the file or a column is missing, if an hour or a score is not a number of at most 15 digits, or
            if a run has two rows at the same hour (two benchmarks in one file, for instance).
    """
    needed, settings = ["arm", "run", "hours", metric], _CSV_SETTINGS.items()
    types = dict.fromkeys(("arm", "run", "rule", "advantages"), pa.string())
    types |= dict.fromkeys(("hours", metric), pa.float64())
    convert = ConvertOptions(column_types=types, null_values=_NOT_MEASURED)
    try:  # one thread, so that an error names its row
        table = read_csv(path, ReadOptions(use_threads=False), ParseOptions(newlines_in_values=True), convert)
        rows, columns = table.to_pylist(), table.column_names
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {', '.join(needed)}.") from error
    repeated = [name for name, count in Counter(columns).items() if count > 1]
    if repeated:
        raise UserError(f"{path} has several columns called {plain(repeated[0])}. Remove or rename all but one.")
    if not rows or not {*needed} <= {*columns}:
        held = f"{path} has no row with {', '.join(needed)}: its columns are {', '.join(columns)}."
        raise UserError(f"{held} Choose a metric with --metric, or rename the columns.")
    configs: dict[str, dict[str, Any]] = {}
    evals: dict[str, dict[str, dict[float, dict[str, Any]]]] = {}
    for number, row in enumerate(rows, start=2):
        name, run, hours = (row[key] for key in needed[:3])
        points = evals.setdefault(name, {}).setdefault(run, {})
        if finite(hours) is None or (row[metric] is not None and finite(row[metric]) is None):
            raise UserError(f"{path}, row {number}: hours is {hours} and {metric} {row[metric]}, expected numbers.")
        if hours in points:
            raise UserError(
                f"{path}, row {number}: run {run} of arm {name} has a second row at {hours} h. Keep one row per "
                "run and checkpoint (one benchmark per file)."
            )
        configs.setdefault(name, {key: row[column] for key, column in settings if row.get(column)})
        points[hours] = row | {"due": hours * HOUR, "seconds": hours * HOUR}
    runs = {name: {run: points.values() for run, points in evals[name].items()} for name in evals}
    return [_arm(name, configs[name], runs[name], metric) for name in evals]


def label_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the arm's name with n and m, unless the name has n already.

    >>> label_of("pods", {"num_rollouts": 64, "num_generations": 16})
    'pods (64→16)'
    >>> label_of("pods-n64-m16", {"num_rollouts": 64, "num_generations": 16})
    'pods-n64-m16'
    """
    n, m = rollouts_of(config)
    label = plain(name) or "(no name)"
    if n is None or m is None or re.search(rf"\b[a-z]?{n}\b", name):
        return label
    return f"{label} ({n}→{m})" if n != m else f"{label} ({n})"


def rollouts_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return n and m of a recipe; n is m if it sets no ``num_rollouts`` (plain GRPO)."""
    m = finite(config.get("num_generations"))
    n = finite(config.get("num_rollouts"))
    n = m if n is None else n
    return (None if n is None else int(n)), (None if m is None else int(m))


def damaged_files(arms: Sequence[Arm]) -> str:
    """Name the files of the runs that could not be read, and lines that were skipped; empty if there are none."""
    found = []
    for run in (run for arm in arms for run in arm.runs):
        contents = {CONFIG: run.config, STATUS: run.status, ENVIRONMENT: run.environment}
        for name, content in {**contents, METRICS: run.metrics, EVALS: run.evals}.items():
            path, lines = run.path / name, run.skipped.get(name)
            if lines or (os.path.lexists(path) and (content == {} or not path.is_file())):
                place = "/".join(map(plain, (run.path.parent.name, run.path.name, name)))
                found.append(f"{place} ({f'line {lines[0]}' if lines else 'all of it'})")
    more = f", and {len(found) - _MOST_DAMAGED} more files" if len(found) > _MOST_DAMAGED else ""
    return ", ".join(found[:_MOST_DAMAGED]) + more
