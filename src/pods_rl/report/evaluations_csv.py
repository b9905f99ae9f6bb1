"""Arms from a CSV of evaluations, made by any tool."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .arms import Arm, label_of
from .curves import HOUR, MOST_CHECKPOINTS, Curve, align, other_metrics, standard_errors

_CSV_SETTINGS = {"rule": "rule", "num_rollouts": "n", "num_generations": "m", "advantages": "advantages"}
_NOT_MEASURED = ("", "nan", "na", "n/a", "null", "none", "-")  # as spreadsheets and data frames write it
_MOST_ARMS = 256  # with more, the column does not name arms
_ALL_CHECKPOINTS = 60_000  # of all arms of a CSV together: what the tables hold


class _Rows:
    """The rows of one arm, column by column."""

    def __init__(self, config: Mapping[str, str], columns: Iterable[str]) -> None:
        self.config = config
        self.runs: dict[str, int] = {}  # the number of each run
        self.run_K = array("q")
        self.values_K = {name: array("d") for name in columns}  # hours first
        self._seen: set[tuple[int, float]] = set()

    def add(self, run: str, values: Sequence[float]) -> bool:
        """Add a row, unless there is one of the same run and hour."""
        key = (self.runs.setdefault(run, len(self.runs)), values[0])
        if key in self._seen:
            return False
        self._seen.add(key)
        self.run_K.append(key[0])
        for column, value in zip(self.values_K.values(), values, strict=True):
            column.append(value)
        return True

    def curve(self, metric: str, most: int) -> Curve | None:
        if metric not in self.values_K:
            return None
        values = {name: np.array(column) for name, column in self.values_K.items()}
        scores, seconds, none = values[metric], values["hours"] * HOUR, np.zeros(len(self.run_K))
        errors = standard_errors(scores, values.get(f"{metric}_se", none), values.get("prompts", none), metric)
        return align([*self.runs], np.array(self.run_K), seconds, seconds, scores, errors, most=most)


def arms_from_csv(path: str | Path, metric: str = "answer_accuracy") -> list[Arm]:
    """Return the arms of a CSV with a row per run and checkpoint, in the order in which they first appear.

    Args:
        path: columns ``arm``, ``run``, ``hours`` (nominal, also taken as the real time), and the metric; optional,
            ``<metric>_se``, the standard error of an evaluation, or ``prompts``, how many it was over; ``rule``,
            ``n``, ``m`` and ``advantages`` describe an arm.
        metric: the column to read; a row with nothing there is skipped.

    Raises:
        UserError: for a missing file or column, for an hour or a score that is not a number, and where a run has two
            rows at the same hour (two benchmarks in one file, for instance).
    """
    needed = ["arm", "run", "hours", metric]
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            found = _read_rows(path, csv.reader(file), metric, needed)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {', '.join(needed)}.") from error
    most = max(200, min(MOST_CHECKPOINTS, _ALL_CHECKPOINTS // len(found)))
    arms = []
    for name, rows in found.items():
        curves = {key: curve for key in sorted(other_metrics(metric)) if (curve := rows.curve(key, most))}
        arms.append(Arm(name, label_of(name, rows.config), rows.curve(metric, most), rows.config, other_curves=curves))
    return arms


def curves_from_csv(path: str | Path, metric: str = "answer_accuracy") -> dict[str, Curve]:
    """Return the curves of a CSV by arm (``arms_from_csv``)."""
    return {arm.name: arm.curve for arm in arms_from_csv(path, metric) if arm.curve}


def _number(text: str | None) -> float:
    """A finite number, else NaN."""
    try:
        value = float(text or "")
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _read_rows(path: str | Path, lines: Any, metric: str, needed: Sequence[str]) -> dict[str, _Rows]:
    columns: list[str] = next(lines, [])
    missing = [name for name in needed if name not in columns]
    measures = [metric, *other_metrics(metric)]
    read = dict.fromkeys(["hours", *measures, *(f"{measure}_se" for measure in measures), "prompts"])
    place = {name: columns.index(name) for name in columns}
    numbers = {name: place[name] for name in read if name in place}
    arms: dict[str, _Rows] = {}
    for row in lines if not missing else ():
        if not row:
            continue
        row += [None] * (len(columns) - len(row))
        values = [_number(row[at]) for at in numbers.values()]
        for name, value in zip(numbers, values[:2], strict=False):  # the hours and the metric
            if math.isnan(value) and (name == "hours" or (row[place[name]] or "").strip().lower() not in _NOT_MEASURED):
                expected = "a number" if name == "hours" else "a number, or nothing if it was not measured"
                raise UserError(f"{path}, line {lines.line_num}: {name} is {row[place[name]]!r}, expected {expected}.")
        arm, run = row[place["arm"]] or "", row[place["run"]] or ""
        if arm not in arms:
            if len(arms) == _MOST_ARMS:
                raise UserError(
                    f"{path} has more than {_MOST_ARMS} arms, such as {arm!r}. The column arm must hold the name of "
                    "an arm, the same for all of its runs."
                )
            given = {key: row[place[column]] for key, column in _CSV_SETTINGS.items() if column in place}
            arms[arm] = _Rows({key: value for key, value in given.items() if value}, numbers)
        if not arms[arm].add(run, values):
            raise UserError(
                f"{path}, line {lines.line_num}: run {run} of arm {arm} has a second row at {values[0]} h. Keep one "
                "row per run and checkpoint (one benchmark per file)."
            )
    if not arms:
        held = "no rows" if not missing else f"columns {', '.join(columns)}" if columns else "no columns"
        raise UserError(
            f"{path} has {held}: expected rows with {', '.join(needed)}. Choose a metric with --metric, or rename the "
            "columns."
        )
    return arms
