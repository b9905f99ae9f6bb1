"""The tables of a report: the values of each as a CSV, and the same values as cells, which every output shows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..engines import PHASES
from ..runs import Run
from ..text import counted
from .analysis import Analysis, ArmResult, Cost, Final, Pair
from .arms import HOUR, LENGTH, Arm, Curve, rollouts_of
from .comparable import OWN_TO_A_RUN, task_of
from .contrasts import AXES, Ablation
from .intervals import SCORE_DIGITS
from .progress import progress_of
from .statistics import Speedup
from .text import as_text, csv_text, duration, finite, finite_numbers, number, plain, tally, unit_for, words
from .wording import (
    LEVEL_MARGIN,
    difference_text,
    differs_text,
    level_text,
    pairing_text,
    result_text,
    runs_text,
    score_text,
    settled_text,
    short_target_text,
    speedup_text,
    step_text,
    time_to_level_text,
    verdict_text,
)

CSV_NAMES = ("final", "pairs", "speedup", "ablations", "curves", "runs", "config")
"""The tables that are files; the others are shown only, and final.csv and runs.csv have their values."""

Row = dict[str, Any]
"""The values of a CSV by key, and under ``result`` or ``pair`` what the displayed cells are made from."""


@dataclass(frozen=True)
class Column:
    """A displayed column: a key of the row, or a function that makes a cell from a row."""

    title: str
    show: str | Callable[[Row], str]
    digits: int = SCORE_DIGITS
    is_text: bool = False
    terminal: str = ""  # title in the terminal, which shows only columns that have one
    bar: str = ""  # key of a share that the page draws as a bar before the cell

    def cell(self, row: Row) -> str:
        if isinstance(self.show, str):
            return number(row.get(self.show), self.digits)
        return self.show(row)


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of values, and the cells that are displayed of them."""

    name: str
    title: str
    keys: tuple[str, ...]  # of a row, in the order of the CSV; none in a table that is not a file
    columns: tuple[Column, ...]  # none in a table that is a CSV only
    rows: tuple[Row, ...]
    note: str = ""

    @cached_property
    def cells(self) -> list[list[str]]:
        """The displayed cells by row, the same in every output; none of a table that is a CSV only."""
        cells = []
        if self.columns:
            for row in self.rows:
                cells.append([column.cell(row) for column in self.columns])
        return cells

    def to_csv(self) -> str:
        """Return raw values; a missing value is an empty field, a bool is true or false, a text is not a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([csv_text(plain(key)) for key in self.keys])
        for row in self.rows:
            writer.writerow([_raw(row.get(key)) for key in self.keys])
        return text.getvalue()


def _raw(value: Any) -> Any:
    """Return a value as a CSV holds it."""
    if value is None:
        return ""
    if isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, str):
        return csv_text(value)
    return value


def _speedup_cell(row: Row) -> str:
    """Return the speedup of a pair, or of an arm against the baseline."""
    if "pair" in row:
        return speedup_text(row["pair"].speedup, row["pair"].arm)
    return speedup_text(row["result"].speedup, row["result"].arm)


_ARM = Column("arm", "label", is_text=True, terminal="arm")
_SPEEDUP = Column("speedup, 95 % interval", _speedup_cell)
_SHORT = {"both_accuracy": "both right", LENGTH: "tokens"}  # titles that a column has room for


def _final_column(analysis: Analysis) -> Column:
    return Column("final, 95 % interval", lambda row: result_text(analysis, row["result"]))


def _score_column(analysis: Analysis, title: str, key: str, metric: str) -> Column:
    """Return a column of scores by a metric."""

    def cell(row: Row) -> str:
        score = finite(row.get(key))
        return "–" if score is None else score_text(analysis, metric, score)

    return Column(title, cell)


def tables(analysis: Analysis) -> dict[str, Table]:
    """Return every table of a report by name, in the order in which page and Markdown show them."""
    made = (
        progress_table(analysis),
        result_table(analysis),
        costs_table(analysis),
        arms_table(analysis),
        pairs_table(analysis),
        ablations_table(analysis),
        runs_table(analysis),
        config_table(analysis),
        speedup_table(analysis),
        curves_table(analysis),
    )
    return {table.name: table for table in made}


# ---------------------------------------------------------------------------------------------- by arm


def result_table(analysis: Analysis) -> Table:
    """A row for each arm: final score, seconds of a step, time to the level, and a verdict. It opens every output."""
    rows: tuple[Row, ...] = ()
    if analysis.scored or not analysis.states["running"]:
        rows = tuple(_arm_row(analysis, result) for result in analysis.results)
    times = set()
    end_of_last = 0.0
    for result in analysis.scored:
        assert result.final
        times.add(result.final.final_due)
        end_of_last = max(end_of_last, result.final.final_seconds)
    unit = unit_for(end_of_last)
    columns = [_ARM]
    tasks = {row["task"] for row in rows}
    if len(tasks - {""}) > 1:
        columns.append(Column("task", "task", is_text=True, terminal="task"))
    score = f"final {words(analysis.metric)}, 95 % interval"
    columns.append(Column(score, lambda row: result_text(analysis, row["result"]), terminal="final [95 %]"))
    if len(times) > 1:
        columns.append(_at_column(unit))
    columns.append(Column("seconds a step", lambda row: step_text(row["result"].cost), terminal="a step"))
    notes = []
    if analysis.level is not None and analysis.baseline is not None:
        target = f"to {short_target_text(analysis, analysis.level)}"
        columns.append(_time_column(f"time {target}", unit, target))
        notes.append(
            f"Time {target}: when the mean curve first has {level_text(analysis.baseline)}, on straight lines between "
            "evaluations."
        )
    if analysis.baseline is not None and len(analysis.results) > 1:
        columns.append(
            Column("verdict", lambda row: verdict_text(analysis, row["result"]), is_text=True, terminal="verdict")
        )
    if analysis.pairs:
        notes += _verdict_notes(analysis)
    return Table("result", "Result", (), tuple(columns), rows, " ".join(notes))


def _verdict_notes(analysis: Analysis) -> list[str]:
    """Return what the verdicts of the result mean."""
    assert analysis.baseline is not None
    notes = [
        f"Better or worse: the 95 % interval of the difference from {analysis.baseline.label} excludes 0.",
        "Not settled: it does not, so the difference may be chance.",
    ]
    if analysis.is_share:
        notes.append(f"Level: it does not, and it lies within {100 * LEVEL_MARGIN:g} points of 0.")
    return notes


def _time_column(title: str, unit: str, terminal: str = "") -> Column:
    def cell(row: Row) -> str:
        result = row["result"]
        return time_to_level_text(result.speedup, result.arm, unit)

    return Column(title, cell, terminal=terminal)


def _at_column(unit: str) -> Column:
    return Column("at", lambda row: duration(row.get("final_due", math.nan), unit), terminal="at")


def arms_table(analysis: Analysis) -> Table:
    """A row for each arm: its settings, first and final score, time to the level, and seconds per step."""
    rows = tuple(_arm_row(analysis, result) for result in analysis.results)
    end_of_last = 0.0
    times = set()
    has_margin = False
    for result in analysis.scored:
        assert result.final
        end_of_last = max(end_of_last, result.final.final_seconds)
        times.add(result.final.final_due)
        has_margin = has_margin or not math.isnan(result.margin)
    unit = unit_for(end_of_last)
    columns = [_ARM]
    notes = []
    tasks = {row["task"] for row in rows}
    if len(tasks - {""}) > 1:
        columns.append(Column("task", "task", is_text=True))
    columns.append(_score_column(analysis, "start", "start", analysis.metric))
    columns += [_final_column(analysis), _score_column(analysis, "peak", "peak", analysis.metric)]
    if len(times) > 1:
        columns.append(_at_column(unit))
        notes.append("Scores are at the time that “at” gives; peaks are the highest until then.")
    else:
        notes.append(f"Scores are at {duration(analysis.horizon)} of training; peaks are the highest until then.")
    if has_margin:
        notes.append("± is 1.96 standard errors of the evaluation of a single run.")
    if analysis.baseline and _has_speedups(analysis):
        level = "to\u00a099\u00a0%"
        columns.append(_time_column(level, unit))
        columns.append(_SPEEDUP)
        notes.append(
            f"“99 %” is {level_text(analysis.baseline)}: the mean curve crosses it on a straight line between two "
            "evaluations."
        )
    other_metrics = analysis.metrics[1:]
    for metric in other_metrics:
        columns.append(_score_column(analysis, _SHORT.get(metric, words(metric)), metric, metric))
    columns.append(Column("runs", lambda row: runs_text(row["result"].arm)))
    keys = (
        "arm rule n m runs unfinished task start final final_hours final_runs final_low final_high peak "
        "peak_hours hours_to_p99 speedup ci_low ci_high never_reached problem steps seconds_per_step "
        "settled evaluation_se"
    )
    names = (*keys.split(), *PHASES, "other", *other_metrics)
    if not analysis.scored:
        columns = []  # a file only
    return Table("final", f"All scores: {words(analysis.metric)}", names, tuple(columns), rows, " ".join(notes))


def _has_speedups(analysis: Analysis) -> bool:
    """Whether some arm is compared with the baseline."""
    return any(result.speedup for result in analysis.results)


def costs_table(analysis: Analysis) -> Table:
    """A row for each arm: its steps, and the seconds of a step by phase. On the page only: final.csv has them."""
    rows = []
    for result in analysis.results:
        if result.cost:
            rows.append(_arm_row(analysis, result))
    phases = [Column(phase, phase, 4) for phase in (*PHASES, "other")]
    columns = (_ARM, Column("steps", "steps", 0), Column("s/step", "seconds_per_step"), *phases)
    note = "Evaluation is not in the training clock; “other” is the time outside all phases."
    return Table("costs", "Seconds per step", (), columns, tuple(rows), note)


def ablations_table(analysis: Analysis) -> Table:
    """A row for each value of each setting that was varied."""
    rows: list[Row] = []
    for ablation in analysis.ablations:
        rows += _ablation_rows(analysis, ablation)
    columns = [Column("setting", "setting", is_text=True), Column("value", "value", is_text=True), _ARM]
    columns += [_final_column(analysis), _score_column(analysis, "peak", "peak", analysis.metric)]
    if _has_speedups(analysis):
        columns.append(_SPEEDUP)
    if any(result.cost for result in analysis.results):
        columns.append(Column("s/step", "seconds_per_step"))
    keys = "axis value arm runs final low high peak speedup ci_low ci_high seconds_per_step"
    reference = ""
    if analysis.ablations:
        reference = analysis.ablations[0].reference.label
    note = f"Arms that differ in one setting from {reference}. Rows follow m: batches are compared in prompts."
    return Table("ablations", "Ablations", tuple(keys.split()), tuple(columns), tuple(rows), note)


def _ablation_rows(analysis: Analysis, ablation: Ablation) -> list[Row]:
    rows = []
    for arm, value in zip(ablation.arms, ablation.values, strict=True):
        row = _arm_row(analysis, analysis.result_of(arm.name))
        rows.append(row | {"setting": AXES[ablation.axis], "axis": ablation.axis, "value": value})
    return rows


def _arm_row(analysis: Analysis, result: ArmResult) -> Row:
    arm = result.arm
    n, m = rollouts_of(arm.config)
    row: Row = {
        "result": result,
        "arm": arm.name,
        "label": arm.label,
        "rule": arm.config.get("rule"),
        "n": n,
        "m": m,
        "task": _task_of(arm),
        "runs": arm.run_count,
        "unfinished": arm.unfinished,
    }
    row |= _other_scores(result)
    if result.cost:
        row |= _cost_row(result.cost)
    if result.final:
        row |= _final_row(result.final)
    if result.speedup:
        row |= _speedup_row(result.speedup) | {"hours_to_p99": _hours(result.speedup.arm_time)}
        if arm is not analysis.baseline:
            row["settled"] = result.speedup.settled
    return row


def _cost_row(cost: Cost) -> Row:
    return {"steps": cost.steps, "seconds_per_step": cost.seconds_per_step, "other": cost.other, **cost.phases}


def _final_row(final: Final) -> Row:
    return {
        "start": final.start,
        "final": final.final,
        "final_due": final.final_due,
        "final_hours": final.final_seconds / HOUR,
        "final_runs": final.final_runs,
        # ablations.csv has these two by their short names
        "final_low": final.low,
        "final_high": final.high,
        "low": final.low,
        "high": final.high,
        "peak": final.peak,
        "peak_hours": final.peak_seconds / HOUR,
        "evaluation_se": final.error,
    }


def _task_of(arm: Arm) -> str:
    return plain(task_of(arm.runs).get("name") or arm.config.get("task") or "")


def _other_scores(result: ArmResult) -> Row:
    """Return the score by each metric other than the compared one, where the final score is."""
    horizon = math.inf
    if result.final:
        horizon = result.final.final_due
    scores: Row = {}
    for metric, curve in result.arm.curves.items():
        if curve is result.arm.curve:
            continue
        at = curve.last(horizon)
        if at is None:
            scores[metric] = math.nan
        else:
            scores[metric] = float(curve.mean[at])
    return scores


# -------------------------------------------------------------------------------- pairs, speedups and curves


def pairs_table(analysis: Analysis) -> Table:
    """A row for each pair of arms: the difference of their final scores, and the speedup to the rival's level."""
    rows = tuple(_pair_row(pair) for pair in analysis.pairs)
    last = max((pair.due for pair in analysis.pairs), default=0.0)
    unit = unit_for(last)
    columns = (
        _ARM,
        Column("against", "against", is_text=True),
        Column("differs in", lambda row: differs_text(row["pair"]), is_text=True),
        Column("at", lambda row: duration(row["pair"].due, unit)),
        Column("difference, 95 % interval", lambda row: difference_text(analysis, row["pair"].difference)),
        _SPEEDUP,
        Column("settled", lambda row: settled_text(row["pair"])),
        Column("interval", lambda row: pairing_text(row["pair"]), is_text=True),
    )
    keys = (
        "arm other hours score other_score runs other_runs difference low high paired settled "
        "speedup ci_low ci_high speedup_settled differs_in shows"
    )
    note = (
        "The difference is of the scores at the last time at which both arms have them. "
        "Of many pairs, some are settled by chance."
    )
    return Table("pairs", "Pairs of arms", tuple(keys.split()), columns, rows, note)


def _pair_row(pair: Pair) -> Row:
    return {
        "pair": pair,
        "arm": pair.arm.name,
        "label": pair.arm.label,
        "other": pair.rival.name,
        "against": pair.rival.label,
        "hours": pair.due / HOUR,
        "score": pair.score,
        "other_score": pair.rival_score,
        "runs": pair.runs,
        "other_runs": pair.rival_runs,
        "difference": pair.difference.mean,
        "low": pair.difference.low,
        "high": pair.difference.high,
        "paired": pair.difference.paired,
        "settled": pair.difference.settled,
        "speedup": pair.speedup.speedup,
        "ci_low": pair.speedup.ci_low,
        "ci_high": pair.speedup.ci_high,
        "speedup_settled": pair.speedup.settled,
        "differs_in": ", ".join(pair.differs_in or ()),
        "shows": pair.shows,
    }


def speedup_table(analysis: Analysis) -> Table:
    """A row for each arm that is compared with the baseline. A CSV only."""
    rows = []
    for result in analysis.results:
        if result.speedup:
            row = {"arm": result.arm.name, "arm_hours": _hours(result.speedup.arm_time)}
            rows.append(row | _speedup_row(result.speedup))
    keys = "arm criterion interpolated threshold baseline_hours arm_hours speedup ci_low ci_high never_reached problem"
    return Table("speedup", "Time to the baseline’s level", tuple(keys.split()), (), tuple(rows))


def _speedup_row(speedup: Speedup) -> Row:
    return {
        "criterion": speedup.criterion,
        "interpolated": speedup.interpolated,
        "threshold": speedup.threshold,
        "baseline_hours": _hours(speedup.baseline_time),
        "speedup": speedup.speedup,
        "ci_low": speedup.ci_low,
        "ci_high": speedup.ci_high,
        "never_reached": speedup.never_reached,
        "problem": speedup.problem,
    }


def _hours(seconds: float) -> float | None:
    if not math.isfinite(seconds):
        return None
    return seconds / HOUR


def curves_table(analysis: Analysis) -> Table:
    """Every checkpoint of every arm. A CSV only."""
    rows: list[Row] = []
    for arm in analysis.arms:
        for metric, curve in arm.curves.items():
            for row in _curve_rows(curve):
                rows.append({"arm": arm.name, "metric": metric, **row})
    keys = ("arm", "metric", "due_hours", "hours", "runs", "mean", "low", "high")
    return Table("curves", "Scores over time", keys, (), tuple(rows))


def _curve_rows(curve: Curve) -> list[Row]:
    """Return a row for each checkpoint."""
    low, high = curve.interval
    run_counts = (~np.isnan(curve.scores)).sum(axis=0)
    rows = []
    for at in range(len(curve.due)):
        rows.append(
            {
                "due_hours": float(curve.due[at]) / HOUR,
                "hours": float(curve.times[at]) / HOUR,
                "runs": int(run_counts[at]),
                "mean": float(curve.mean[at]),
                "low": float(low[at]),
                "high": float(high[at]),
            }
        )
    return rows


# ------------------------------------------------------------------------------------- runs and settings


def progress_table(analysis: Analysis) -> Table:
    """Every run that still trains, before its first evaluation too: how far it is, and its last reward and score."""
    rows: list[Row] = []
    for arm in analysis.arms:
        for run in arm.runs:
            if run.state == "running":
                rows.append(_progress_row(arm, run, analysis.metric))
    columns = (
        _ARM,
        Column("run", "run", is_text=True),
        Column("done", _share_cell, bar="share"),
        Column("step", lambda row: _of_budget(row["progress"].step, row["progress"].max_steps)),
        Column("trained for", _time_cell),
        Column("last reward", "reward"),
        _score_column(analysis, f"last {words(analysis.metric)}", "last_score", analysis.metric),
    )
    note = "A run that was killed may still be listed here."
    return Table("progress", "Runs in progress", (), columns, tuple(rows), note)


def _progress_row(arm: Arm, run: Run, metric: str) -> Row:
    progress = progress_of(run)
    scores = finite_numbers(row.get(metric) for row in run.evals)
    last_score = math.nan
    if scores:
        last_score = scores[-1]
    return {
        "arm": arm.name,
        "label": arm.label,
        "run": plain(run.path.name),
        "progress": progress,
        "share": progress.share,
        "reward": progress.reward,
        "last_score": last_score,
    }


def _share_cell(row: Row) -> str:
    share = row["share"]
    if math.isnan(row["progress"].step):
        return "loading"
    if math.isnan(share):
        return "–"
    return f"{100 * share:.0f} %"


def _of_budget(value: float, budget: float) -> str:
    if math.isnan(budget):
        return number(value, 0)
    return f"{number(value, 0)} of {budget:.0f}"


def _time_cell(row: Row) -> str:
    progress = row["progress"]
    if math.isnan(progress.max_seconds):
        return duration(progress.seconds)
    unit = unit_for(progress.max_seconds)
    return f"{duration(progress.seconds, unit)} of {duration(progress.max_seconds, unit)}"


def runs_table(analysis: Analysis) -> Table:
    """Every run with its state, by arm and seed."""
    rows: list[Row] = []
    for arm in analysis.arms:
        for run in arm.runs:
            rows.append(_run_row(arm, run, analysis.metric))
    unit = unit_for(max(finite_numbers(row["seconds"] for row in rows), default=0.0))
    columns = (
        _ARM,
        Column("run", "run", is_text=True),
        Column("state", "state", is_text=True),
        Column("reason", "reason", is_text=True),
        Column("steps", "steps", 0),
        Column("trained for", lambda row: duration(row["seconds"], unit)),
        Column("evaluations", "evaluations"),
        _score_column(analysis, f"last {words(analysis.metric)}", "last_score", analysis.metric),
    )
    keys = "arm run seed state reason steps seconds evaluations last_score device device_name processor dtype"
    note = f"{counted(len(rows), 'run')}: {tally(analysis.states.most_common()) or 'none'}. "
    note += "A run that was killed may still say running."
    return Table("runs", "Runs", tuple(keys.split()), columns, tuple(rows), note)


def _run_row(arm: Arm, run: Run, metric: str) -> Row:
    scores = finite_numbers(row.get(metric) for row in run.evals)
    last_score = math.nan
    if scores:
        last_score = scores[-1]
    seconds = finite(run.status.get("seconds"))
    if seconds is None:
        seconds = math.nan
    return {
        "arm": arm.name,
        "label": arm.label,
        "run": plain(run.path.name),
        "seed": run.seed,
        "state": plain(run.state),
        "reason": plain(run.status.get("reason") or "", limit=200),
        "steps": finite(run.status.get("step")),
        "seconds": seconds,
        "evaluations": len(scores),
        "last_score": last_score,
        "device": plain(run.environment.get("device") or ""),
        "device_name": plain(run.environment.get("device_name") or ""),
        "processor": plain(run.environment.get("processor") or ""),
        "dtype": plain(run.environment.get("precision") or ""),
    }


def config_table(analysis: Analysis) -> Table:
    """The settings in which the arms differ: a row for each arm."""
    arms = [arm for arm in analysis.arms if arm.config]
    settings: set[str] = set()
    for arm in arms:
        settings |= arm.config.keys()
    settings -= OWN_TO_A_RUN | {"arm", "label"}
    differ = []
    for key in sorted(settings, key=str):
        values = {_setting(arm.config, key) for arm in arms}
        if len(values) > 1:
            differ.append(key)
    rows: list[Row] = []
    if differ:
        for arm in arms:
            row: Row = {"arm": arm.name, "label": arm.label}
            for key in differ:
                row[key] = _setting(arm.config, key)
            rows.append(row)
    columns = (_ARM, *(Column(plain(key), key, is_text=True) for key in differ))
    note = "From the recipe of each arm’s first run. The config.yaml of any run has what all arms share."
    return Table("config", "What differs between the arms", ("arm", *differ), columns, tuple(rows), note)


def _setting(config: Mapping[str, Any], key: str) -> str:
    return plain(as_text(config.get(key, "(not set)")), limit=120)
