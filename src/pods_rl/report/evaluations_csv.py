"""Arms from a CSV of evaluations, made by any tool."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .arms import Arm, label_of
from .curves import HOUR, MOST_CHECKPOINTS, Curve, align, finite, other_metrics, standard_errors

_CSV_SETTINGS = {"rule": "rule", "num_rollouts": "n", "num_generations": "m", "advantages": "advantages"}
_NOT_MEASURED = ("", "nan", "na", "n/a", "null", "none", "-")  # as spreadsheets and data frames write it
_MOST_ARMS = 256  # with more, the column does not name arms
_ALL_CHECKPOINTS = 60_000  # of all arms of a CSV together: what the tables hold


@dataclass
class _Rows:
    """The rows of one arm: the number of the run, then the value of each column."""

    config: dict[str, str]
    runs: dict[str, int] = field(default_factory=dict)
    cells: array[float] = field(default_factory=lambda: array("d"))
    seen: set[tuple[int, float]] = field(default_factory=set)

    def curve(self, names: Sequence[str], metric: str, most: int) -> Curve | None:
        if metric not in names:
            return None
        run_K, *columns = np.array(self.cells).reshape(-1, len(names) + 1).T
        values, none = dict(zip(names, columns, strict=True)), np.zeros(len(run_K))
        scores, seconds = values[metric], values["hours"] * HOUR
        errors = standard_errors(scores, values.get(f"{metric}_se", none), values.get("prompts", none), metric)
        return align([*self.runs], run_K.astype(np.int64), seconds, seconds, scores, errors, most=most)


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
            lines = csv.reader(file)
            columns = next(lines, [])
            missing = [name for name in needed if name not in columns]
            measures = [metric, *other_metrics(metric)]
            read = dict.fromkeys(["hours", *measures, *(f"{measure}_se" for measure in measures), "prompts"])
            names = [name for name in read if name in columns]
            found = {} if missing else _read_rows(path, lines, columns, names)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {', '.join(needed)}.") from error
    if not found:
        held = "no rows" if not missing else f"columns {', '.join(columns)}" if columns else "no columns"
        raise UserError(
            f"{path} has {held}: expected rows with {', '.join(needed)}. Choose a metric with --metric, or rename the "
            "columns."
        )
    most = max(200, min(MOST_CHECKPOINTS, _ALL_CHECKPOINTS // len(found)))
    arms = []
    for name, rows in found.items():
        others = {key: curve for key in sorted(other_metrics(metric)) if (curve := rows.curve(names, key, most))}
        curve = rows.curve(names, metric, most)
        arms.append(Arm(name, label_of(name, rows.config), curve, rows.config, other_curves=others))
    return arms


def _read_rows(path: str | Path, lines: Any, columns: Sequence[str], names: Sequence[str]) -> dict[str, _Rows]:
    """Return the rows by arm; of each the columns ``names``, of which the hours and the metric come first."""
    place = {name: columns.index(name) for name in columns}
    arms: dict[str, _Rows] = {}
    for row in lines:
        if not row:
            continue
        row += [""] * (len(columns) - len(row))
        texts = [row[place[name]] for name in names]
        values = [math.nan if (value := finite(text)) is None else value for text in texts]
        for name, text, value in zip(names[:2], texts, values, strict=False):
            if math.isnan(value) and (name == "hours" or text.strip().lower() not in _NOT_MEASURED):
                expected = "a number" if name == "hours" else "a number, or nothing if it was not measured"
                raise UserError(f"{path}, line {lines.line_num}: {name} is {text[:60]!r}, expected {expected}.")
        name, run = row[place["arm"]], row[place["run"]]
        if name not in arms:
            if len(arms) == _MOST_ARMS:
                raise UserError(
                    f"{path} has more than {_MOST_ARMS} arms, such as {name!r}. The column arm must hold the name of "
                    "an arm, the same for all of its runs."
                )
            given = {key: row[place[column]] for key, column in _CSV_SETTINGS.items() if column in place}
            arms[name] = _Rows({key: value for key, value in given.items() if value})
        arm = arms[name]
        key = (arm.runs.setdefault(run, len(arm.runs)), values[0])
        if key in arm.seen:
            raise UserError(
                f"{path}, line {lines.line_num}: run {run} of arm {name} has a second row at {values[0]} h. Keep one "
                "row per run and checkpoint (one benchmark per file)."
            )
        arm.seen.add(key)
        arm.cells.extend([key[0], *values])
    return arms
