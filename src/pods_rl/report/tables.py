"""The tables of a report: the values of each as a CSV, and the same values as cells, which every output shows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..engines import PHASES
from ..runs import Run
from ..runs.progress import progress_of
from ..runs.speed import FIELD, speed_of
from ..text import counted
from .analysis import Analysis, ArmPair, ArmResult
from .arms import HOUR, LENGTH, Arm, rollouts_of
from .comparable import OWN_TO_A_RUN, task_of
from .text import as_text, csv_text, duration, finite, finite_numbers, number_text, one_line, tally, unit_for, words
from .wording import (
    LEVEL_MARGIN,
    difference_text,
    result_text,
    runs_text,
    score_text,
    settled_text,
    speedup_text,
    step_text,
    target_text,
    time_to_target_text,
    verdict_text,
)

CSV_NAMES = ("final", "pairs", "curves", "runs", "config")
"""The tables that are files; the others are shown only, and final.csv and runs.csv have their values."""

ARM = "arm"
"""The title of the column of arms, which the page marks with their colours."""

_TEXTS = frozenset({ARM, "task", "verdict", "against", "shows", "differs in", "settled", "run", "state", "reason"})
_SHORT_TITLES = {"both_accuracy": "both right", LENGTH: "tokens"}  # titles that a column has room for

Row = dict[str, Any]  # values by the key of their column in a CSV


@dataclass(frozen=True, eq=False)
class Table:
    """The cells that are displayed, and the values of the CSV. One of the two may be without columns."""

    name: str
    title: str
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # displayed cells by title
    arms: Sequence[str] = ()  # the name of the arm of each displayed row
    keys: Sequence[str] = ()  # of the CSV
    rows: Sequence[Row] = ()  # of the CSV
    note: str = ""
    texts: Collection[str] = _TEXTS  # titles of columns that are not numbers
    terminal: Mapping[str, str] = field(default_factory=dict)  # titles in the terminal, which shows only these columns

    @property
    def titles(self) -> list[str]:
        return [*self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """The displayed cells by row, the same in every output."""
        return [list(row) for row in zip(*self.columns.values(), strict=True)]

    def to_csv(self) -> str:
        """Return raw values; a missing value is an empty field, a bool is true or false, a text is not a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(csv_text(one_line(key)) for key in self.keys)
        for row in self.rows:
            writer.writerow(_raw(row.get(key)) for key in self.keys)
        return text.getvalue()


def _raw(value: Any) -> Any:
    """Return a value as a CSV holds it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.10g}"
    if isinstance(value, str):
        return csv_text(value)
    return value


def tables(analysis: Analysis) -> dict[str, Table]:
    """Return every table of a report by name, in the order in which page and Markdown show them."""
    made = (
        result_table(analysis),
        costs_table(analysis),
        arms_table(analysis),
        pairs_table(analysis),
        runs_table(analysis),
        config_table(analysis),
        curves_table(analysis),
    )
    return {table.name: table for table in made}


# ---------------------------------------------------------------------------------------------- by arm


def result_table(analysis: Analysis) -> Table:
    """A row for each arm: final score, seconds per step, time to the target, and a verdict. It opens every output."""
    # Runs in progress have nothing to show before their first evaluation.
    has_rows = analysis.scored or not analysis.states["running"]
    results = analysis.results if has_rows else ()
    score = f"final {words(analysis.metric)}, 95 % interval"
    terminal = {ARM: ARM, "task": "task", score: "final [95 %]", "at": "at", "seconds per step": "per step"}
    finals = [result.final for result in analysis.scored if result.final]
    unit = unit_for(max((final.final_seconds for final in finals), default=0.0))
    cells = _first_columns(results)
    cells[score] = [result_text(analysis, result.final) for result in results]
    if len({final.final_due for final in finals}) > 1:  # scores at one time need no column for it
        cells["at"] = [duration(result.final.final_due if result.final else math.nan, unit) for result in results]
    cells["seconds per step"] = [step_text(result.cost) for result in results]
    notes = []
    if analysis.target is not None and analysis.baseline is not None:
        to_target = f"to {target_text(analysis)}"
        cells[f"time {to_target}"] = [time_to_target_text(result, unit) for result in results]
        terminal[f"time {to_target}"] = to_target
        notes.append(
            f"Time {to_target}: when the mean curve first is within 1 % of {analysis.baseline.label}’s peak, on "
            "straight lines between evaluations."
        )
    if analysis.baseline is not None and len(analysis.results) > 1:
        cells["verdict"] = [verdict_text(analysis, result.arm) for result in results]
        terminal["verdict"] = "verdict"
        notes.append(
            f"Better or worse: the difference from {analysis.baseline.label} is settled. Not settled: it may be chance."
        )
        if analysis.is_share:
            notes.append(f"Level: not settled, and its interval lies within {100 * LEVEL_MARGIN:g} points of 0.")
    return Table("result", "Result", cells, _arms(results), note=" ".join(notes), terminal=terminal)


def arms_table(analysis: Analysis) -> Table:
    """A row for each arm: first and highest score, and the final ones by all other metrics."""
    results = analysis.results
    other_metrics = analysis.metrics[1:]
    rows = [_arm_row(analysis, result) for result in results]
    keys = [
        "arm", "rule", "n", "m", "runs", "unfinished", "task", "start", "final", "final_hours", "final_runs",
        "final_low", "final_high", "peak", "peak_hours", "threshold", "hours_to_p99", "steps", "seconds_per_step",
        *PHASES, "other", *other_metrics,
    ]  # fmt: skip
    title = "All scores"
    if not analysis.scored:
        return Table("final", title, keys=keys, rows=rows)  # a file only
    cells = _first_columns(results)
    cells["start"] = _score_cells(analysis, rows, "start")
    cells["peak"] = _score_cells(analysis, rows, "peak")
    for metric in other_metrics:
        cells[_SHORT_TITLES.get(metric, words(metric))] = _score_cells(analysis, rows, metric, metric)
    cells["runs"] = [runs_text(result.arm) for result in results]
    note = f"First and highest {words(analysis.metric)}, and the other metrics where the final score is."
    return Table("final", title, cells, _arms(results), keys, rows, note)


def costs_table(analysis: Analysis) -> Table:
    """A row for each arm: its steps, and the seconds of a step by phase. On the page only: final.csv has them."""
    results = [result for result in analysis.results if result.cost]
    rows = [_arm_row(analysis, result) for result in results]
    cells = {
        ARM: [result.arm.label for result in results],
        "steps": [number_text(row["steps"], 0) for row in rows],
        "s/step": [number_text(row["seconds_per_step"]) for row in rows],
    }
    for phase in (*PHASES, "other"):
        cells[phase] = [number_text(row[phase], 4) for row in rows]
    note = "Evaluation is not in the training clock; “other” is the time outside all phases."
    return Table("costs", "Seconds per step", cells, _arms(results), note=note)


def _arms(results: Sequence[ArmResult]) -> list[str]:
    return [result.arm.name for result in results]


def _first_columns(results: Sequence[ArmResult]) -> dict[str, list[str]]:
    """Return the columns with which a table of arms begins: their labels, and their tasks if there are several."""
    cells = {ARM: [result.arm.label for result in results]}
    tasks = [_task_of(result.arm) for result in results]
    if len({*tasks} - {""}) > 1:
        cells["task"] = [number_text(task) for task in tasks]
    return cells


def _task_of(arm: Arm) -> str:
    return one_line(task_of(arm.runs).get("name") or arm.config.get("task") or "")


def _score_cells(analysis: Analysis, rows: Sequence[Row], key: str, metric: str = "") -> list[str]:
    """Return the scores under a key as cells; by the compared metric if no other is given."""
    scores = [finite(row.get(key)) for row in rows]
    return ["–" if score is None else score_text(analysis, metric or analysis.metric, score) for score in scores]


def _arm_row(analysis: Analysis, result: ArmResult) -> Row:
    arm = result.arm
    n, m = rollouts_of(arm.config)
    row: Row = {
        "arm": arm.name,
        "rule": arm.config.get("rule"),
        "n": n,
        "m": m,
        "task": _task_of(arm),
        "runs": arm.run_count,
        "unfinished": arm.unfinished,
    }
    final = result.final
    for metric, curve in arm.curves.items():  # scores by the other metrics, where the final score is
        if curve is not arm.curve:
            at = curve.last(final.final_due if final else math.inf)
            row[metric] = math.nan if at is None else float(curve.mean[at])
    cost = result.cost
    if cost:
        row |= {"steps": cost.steps, "seconds_per_step": cost.seconds_per_step, "other": cost.other, **cost.phases}
    if final:
        row |= asdict(final)
        row |= {"final_hours": final.final_seconds / HOUR, "peak_hours": final.peak_seconds / HOUR}
    if analysis.target is not None and final:
        time = result.time_to_target
        row |= {"threshold": analysis.target, "hours_to_p99": time / HOUR if math.isfinite(time) else None}
    return row


# -------------------------------------------------------------------------------- pairs, speedups and curves


def pairs_table(analysis: Analysis) -> Table:
    """A row for each pair of arms: the differences of their scores, and the speedup to the target."""
    pairs = analysis.pairs
    unit = unit_for(max((pair.due for pair in pairs), default=0.0))
    cells = {
        ARM: [pair.arm.label for pair in pairs],
        "against": [pair.rival.label for pair in pairs],
        "shows": [pair.shows or "–" for pair in pairs],
        "difference, 95 % interval": [difference_text(analysis, pair.difference) for pair in pairs],
        "speedup, 95 % interval": [speedup_text(pair.speedup, pair.arm) for pair in pairs],
        "settled": [settled_text(pair) for pair in pairs],
        "at": [duration(pair.due, unit) for pair in pairs],
        "differs in": [one_line(", ".join(pair.differs_in), limit=200) or "–" for pair in pairs],
    }
    keys = (
        "arm", "other", "hours", "score", "other_score", "runs", "other_runs",
        "difference", "low", "high", "p", "paired", "settled",
        "over_time", "over_time_low", "over_time_high", "over_time_p", "over_time_settled",
        "speedup", "ci_low", "ci_high", "speedup_settled", "differs_in", "shows",
    )  # fmt: skip
    rows = [_pair_row(pair) for pair in pairs]
    note = (
        "The difference is of the scores at the last time at which both arms have them. The speedup is to "
        f"{target_text(analysis)}. What is settled is so among all differences of this table (Holm)."
    )
    return Table("pairs", "Pairs of arms", cells, [pair.arm.name for pair in pairs], keys, rows, note)


def _pair_row(pair: ArmPair) -> Row:
    speedup = pair.speedup
    over_time = pair.over_time
    row: Row = {
        "arm": pair.arm.name,
        "other": pair.rival.name,
        "hours": pair.due / HOUR,
        "score": pair.score,
        "other_score": pair.rival_score,
        "runs": pair.runs,
        "other_runs": pair.rival_runs,
        "difference": pair.difference.mean,
        "settled": pair.difference.settled,
        "over_time": over_time.mean,
        "over_time_settled": None if math.isnan(over_time.mean) else over_time.settled,
        "differs_in": ", ".join(pair.differs_in),
        "shows": pair.shows,
    }
    row |= asdict(pair.difference)
    row |= {f"over_time_{name}": value for name, value in asdict(over_time).items()}
    if speedup:
        row |= asdict(speedup) | {"speedup_settled": pair.speedup_settled}
    return row


def curves_table(analysis: Analysis) -> Table:
    """Every checkpoint of every arm. A CSV only."""
    keys = ("arm", "metric", "due_hours", "hours", "runs", "mean", "low", "high")
    rows: list[Row] = []
    for arm in analysis.arms:
        for metric, curve in arm.curves.items():
            run_counts = (~np.isnan(curve.scores)).sum(axis=0)
            columns = (curve.due / HOUR, curve.times / HOUR, run_counts, curve.mean, *curve.interval)
            for checkpoint in zip(*(column.tolist() for column in columns), strict=True):
                rows.append(dict(zip(keys, (arm.name, metric, *checkpoint), strict=True)))
    return Table("curves", "Scores over time", keys=keys, rows=rows)


# ------------------------------------------------------------------------------------- runs and settings


def runs_table(analysis: Analysis) -> Table:
    """Every run with its state, by arm and seed. Of a run that still trains, how far it is and its last reward."""
    runs = [(arm, run) for arm in analysis.arms for run in arm.runs]
    rows = [_run_row(arm, run, analysis.metric) for arm, run in runs]
    unit = unit_for(max(finite_numbers(row["seconds"] for row in rows), default=0.0))
    cells = {
        ARM: [arm.label for arm, _ in runs],
        "run": [row["run"] for row in rows],
        "state": [_state_cell(row) for row in rows],
        "reason": [number_text(row["reason"]) for row in rows],
        "steps": [number_text(row["steps"], 0) for row in rows],
        "trained for": [duration(row["seconds"], unit) for row in rows],
    }
    if analysis.states["running"]:
        cells["last reward"] = [number_text(row["last_reward"]) for row in rows]
    cells["evaluations"] = [number_text(row["evaluations"]) for row in rows]
    cells[f"last {words(analysis.metric)}"] = _score_cells(analysis, rows, "last_score")
    if any(row[FIELD] for row in rows):
        cells["speed check"] = [number_text(1000 * row[FIELD], 1) + " ms" if row[FIELD] else "–" for row in rows]
    keys = (
        "arm", "run", "seed", "state", "reason", "steps", "seconds", "evaluations", "last_score", FIELD,
        "device", "device_name", "processor", "dtype",
    )  # fmt: skip
    note = f"{counted(len(rows), 'run')}: {tally(analysis.states.most_common()) or 'none'}. "
    note += "A run that was killed on another machine may still say running."
    if "speed check" in cells:
        note += " Speed check: the time of a fixed piece of work next to each evaluation, the median of a run."
    return Table("runs", "Runs", cells, [arm.name for arm, _ in runs], keys, rows, note)


def _run_row(arm: Arm, run: Run, metric: str) -> Row:
    seconds = finite(run.status.get("seconds"))
    scores = finite_numbers(evaluation.get(metric) for evaluation in run.evals)
    row: Row = {
        "arm": arm.name,
        "run": one_line(run.path.name),
        "seed": run.seed,
        "state": one_line(run.state),
        "reason": one_line(run.status.get("reason") or "", limit=200),
        "steps": finite(run.status.get("step")),
        "seconds": math.nan if seconds is None else seconds,
        "evaluations": len(scores),
        "last_score": scores[-1] if scores else math.nan,
        "last_reward": None,
        FIELD: speed_of(run.evals) or None,
        "device": one_line(run.environment.get("device") or ""),
        "device_name": one_line(run.environment.get("device_name") or ""),
        "processor": one_line(run.environment.get("processor") or ""),
        "dtype": one_line(run.environment.get("precision") or ""),
    }
    if run.state == "running":  # its status may be older than its last logged step
        progress = progress_of(run)
        row |= {"steps": progress.step, "seconds": progress.seconds, "last_reward": progress.reward}
        row["share"] = progress.share
    return row


def _state_cell(row: Row) -> str:
    """Return the state of a run, and of one that still trains the share of its budget that it has used."""
    if row["state"] != "running":
        return number_text(row["state"])
    if math.isnan(row["steps"]):
        return "loading"
    return "running" if math.isnan(row["share"]) else f"running, {100 * row['share']:.0f} %"


def config_table(analysis: Analysis) -> Table:
    """The settings in which the arms differ: a row for each arm."""
    title = "What differs between the arms"
    arms = [arm for arm in analysis.arms if arm.config]
    keys = {str(key) for arm in arms for key in arm.config} - OWN_TO_A_RUN - {"arm"}  # which is the first column
    rows = []
    for arm in arms:
        settings = {key: one_line(as_text(arm.config.get(key, "(not set)")), limit=120) for key in sorted(keys)}
        rows.append({"arm": arm.name, **settings})
    differ = [key for key in sorted(keys) if len({row[key] for row in rows}) > 1]
    if not differ:
        return Table("config", title, keys=["arm"])
    cells = {ARM: [arm.label for arm in arms]} | {key: [number_text(row[key]) for row in rows] for key in differ}
    note = "From the recipe of each arm’s first run. The config.yaml of any run has what all arms share."
    names = [arm.name for arm in arms]
    return Table("config", title, cells, names, ["arm", *differ], rows, note, texts={*cells})
