"""A CSV of evaluations of any tool, read a part at a time into columns of numbers."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .curves import HOUR, MOST_CHECKPOINTS, Curve, align, finite, other_metrics, standard_errors
from .statistics import Array

_SETTINGS = (("rule", "rule"), ("num_rollouts", "n"), ("num_generations", "m"), ("advantages", "advantages"))
_NOT_MEASURED = ("", "nan", "na", "n/a", "null", "none", "-")  # as spreadsheets and data frames write it
_MOST_ARMS = 256  # more is a column that does not name arms
_AT_ONCE = 50_000  # rows
_ALL_CHECKPOINTS = 60_000  # of all arms together: what the tables hold

Row = list[str | None]  # as long as the header; None where the line is shorter


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one arm: K numbers of each column."""

    config: Mapping[str, str]  # rule, num_rollouts, num_generations and advantages, where the CSV has them
    runs: Sequence[str]
    run: NDArray[np.int64]  # the number of each row's run
    hours: Array
    values: Mapping[str, Array]
    most: int  # checkpoints of a curve

    def curve(self, metric: str) -> Curve | None:
        seconds, scores, none = self.hours * HOUR, self.values[metric], np.zeros(len(self.run))
        given, prompts = self.values.get(f"{metric}_se", none), self.values.get("prompts", none)
        errors = standard_errors(scores, given, prompts, metric)
        return align(self.runs, self.run, seconds, seconds, scores, errors, most=self.most)


class _Reader:
    """Takes rows in, checks them, and gives them back by arm."""

    def __init__(self, path: str | Path, columns: Sequence[str], metric: str) -> None:
        self._path, self._columns, self._metric = path, columns, metric
        measures = {metric, *other_metrics(metric)}
        read = {*measures, *(f"{measure}_se" for measure in measures), "prompts"} & {*columns}
        self._read = ["hours", *sorted(read)]
        self._numbers: dict[str, list[Array]] = {name: [] for name in self._read}
        self._codes: list[NDArray[np.int64]] = []
        self._runs: dict[tuple[str, str], int] = {}  # the number of each arm's run
        self._configs: dict[str, dict[str, str]] = {}
        self._rows = 0

    def add(self, rows: Sequence[Row]) -> None:
        place = {name: self._columns.index(name) for name in self._columns}
        for name in self._read:
            self._numbers[name].append(_numbers(rows, place[name]))
        self._check(rows, place)
        arm, run = place["arm"], place["run"]
        for row in rows:
            if (row[arm] or "") not in self._configs:
                self._describe(row, place)
        codes = [self._runs.setdefault((row[arm] or "", row[run] or ""), len(self._runs)) for row in rows]
        self._codes.append(np.array(codes, dtype=np.int64))
        self._rows += len(rows)

    def _check(self, rows: Sequence[Row], place: Mapping[str, int]) -> None:
        """Refuse the first hour that is not a number, and the first score that is neither a number nor missing."""
        for name in ("hours", self._metric):
            for index in np.flatnonzero(np.isnan(self._numbers[name][-1])).tolist():
                text, line = rows[index][place[name]], self._rows + index + 2
                if name == "hours":
                    raise UserError(f"{self._path}, line {line}: hours is {text!r}, expected a number.")
                if (text or "").strip().lower() not in _NOT_MEASURED:
                    raise UserError(
                        f"{self._path}, line {line}: {name} is {text!r}, expected a number, or nothing where it was "
                        "not measured."
                    )

    def _describe(self, row: Row, place: Mapping[str, int]) -> None:
        """A new arm and its settings."""
        name = row[place["arm"]] or ""
        if len(self._configs) == _MOST_ARMS:
            raise UserError(
                f"{self._path} has more than {_MOST_ARMS} arms, such as {name!r}. Expected in the column arm the name "
                "of an arm, the same for all of its runs."
            )
        given = {key: row[place[column]] for key, column in _SETTINGS if column in place}
        self._configs[name] = {key: value for key, value in given.items() if value}

    def arms(self) -> dict[str, Rows]:
        codes, numbers = np.concatenate(self._codes), {key: np.concatenate(v) for key, v in self._numbers.items()}
        names = [*self._runs]
        self._refuse_second_rows(codes, numbers["hours"], names)
        order = {arm: index for index, arm in enumerate(self._configs)}
        arm_K = np.array([order[arm] for arm, _ in names], dtype=np.int64)[codes]
        most = max(200, min(MOST_CHECKPOINTS, _ALL_CHECKPOINTS // len(order)))
        found = {}
        for arm, index in order.items():
            at = np.flatnonzero(arm_K == index)
            own, run_K = np.unique(codes[at], return_inverse=True)
            values = {name: column[at] for name, column in numbers.items() if name != "hours"}
            runs = [names[code][1] for code in own]
            found[arm] = Rows(self._configs[arm], runs, run_K, numbers["hours"][at], values, most)
        return found

    def _refuse_second_rows(self, codes: NDArray[np.int64], hours: Array, names: Sequence[tuple[str, str]]) -> None:
        order = np.lexsort((hours, codes))  # stable: of equal rows the first line comes first
        again = (codes[order][1:] == codes[order][:-1]) & (hours[order][1:] == hours[order][:-1])
        if again.any():
            first = int(order[1:][again].min())
            arm, run = names[codes[first]]
            raise UserError(
                f"{self._path}, line {first + 2}: run {run} of arm {arm} has a second row at {hours[first]} h. Keep "
                "one row per run and checkpoint (one benchmark per file)."
            )


def read_evaluations(path: str | Path, metric: str) -> dict[str, Rows]:
    """The rows of each arm, in the order in which the arms first appear.

    Raises:
        UserError: as ``arms.curves_from_csv``.
    """
    wanted = ["arm", "run", "hours", metric]
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            columns = next(lines, [])
            missing = [column for column in wanted if column not in columns]
            reader, rows = _Reader(path, columns, metric), 0
            full = (line for line in lines if line)
            while not missing and (part := list(islice(full, _AT_ONCE))):
                reader.add([[*line, *[None] * (len(columns) - len(line))] for line in part])
                rows += len(part)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"Cannot read {path} as CSV: {error}. Expected columns {', '.join(wanted)}.") from error
    if missing or not rows:
        held = f"columns {', '.join(columns)}" if missing and columns else f"{rows} rows and columns none"
        raise UserError(
            f"{path} has {held}: expected rows with {', '.join(wanted)}. Choose a metric with --metric, or rename the "
            "columns."
        )
    return reader.arms()


def _numbers(rows: Sequence[Row], place: int) -> Array:
    """A column, NaN where there is no finite number."""
    try:
        values = np.array([float(row[place]) for row in rows])  # type: ignore[arg-type]  # None: below
    except (TypeError, ValueError, OverflowError):
        values = np.array([finite(row[place]) for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)
