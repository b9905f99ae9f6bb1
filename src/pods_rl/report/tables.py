"""The tables of a report: each once, as CSV (raw values), Markdown, and cells for HTML and the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..runs import Run
from ..text import counted
from .analysis import AXES, PHASES, Analysis
from .arms import HOUR, LENGTH, Arm, rollouts_of
from .intervals import Z_95, t_band
from .pooling import OWN_TO_A_RUN, in_order, task_of
from .statistics import SHORT, Speedup
from .text import duration, finite, interval, markdown, number, plain, unit_for, words

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A displayed column: a key of the row, or a function that makes a cell from a row."""

    title: str
    show: str | Callable[[Row], str]
    digits: int = 3
    is_text: bool = False
    terminal: str = ""  # title in the terminal, which shows only columns that have one

    def cell(self, row: Row) -> str:
        return number(row.get(self.show), self.digits) if isinstance(self.show, str) else self.show(row)


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    keys: tuple[str, ...]  # of a row, in the order of the CSV
    columns: tuple[Column, ...]  # none in a table that is a CSV only
    rows: tuple[Row, ...]
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Return the displayed cells."""
        return [[column.cell(row) for column in self.columns] for row in self.rows if self.columns]

    def to_csv(self) -> str:
        """Return raw values; a missing value is an empty field, a bool is true or false."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(plain, self.keys))
        writer.writerows([[_raw(row.get(key)) for key in self.keys] for row in self.rows])
        return text.getvalue()

    def to_markdown(self) -> str:
        head = "| " + " | ".join(markdown(column.title) for column in self.columns) + " |"
        rule = "|" + "|".join("---" if column.is_text else "---:" for column in self.columns) + "|"
        body = ["| " + " | ".join(markdown(cell) for cell in cells) + " |" for cells in self.cells()]
        return "\n".join([head, rule, *body])


def _raw(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else value


def _with_interval(value: str, low: str, high: str, digits: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        score = number(row.get(value), digits)
        spread = interval(row.get(low, math.nan), row.get(high, math.nan), digits)
        return score if spread == "–" else f"{score} {spread}"

    return show


def _speedup_cell(row: Row) -> str:
    """Return the speedup with its interval; of an arm that does not reach the level only what the interval allows."""
    if not row.get("never_reached"):
        return _with_interval("speedup", "ci_low", "ci_high", 2)(row)
    high = row.get("ci_high", math.nan)
    return "never" if math.isnan(high) or not high > 0 else f"never [0.00, {number(high, 2)}]"


def _time_to_level(row: Row, unit: str) -> str:
    """Return when an arm reached the level; of one that ended too early to know, after what time it had not."""
    if row.get("problem") == SHORT:
        return f"> {duration(row['arm_end'], unit)}"
    return "–" if row.get("problem") else duration(row["arm_time"], unit)


def _final_cell(row: Row) -> str:
    """Return the final score with its interval over runs, or for a single run with the error of its evaluation."""
    shown = _with_interval("final", "low", "high", 3)(row)
    error = row.get("error", math.nan)
    return shown if row["runs"] != 1 or math.isnan(error) else f"{shown} ±{number(Z_95 * error)}"


def _runs_cell(row: Row) -> str:
    return f"{row['runs']} ({row['unfinished']})" if row.get("unfinished") else str(row["runs"])


_ARM = Column("arm", "label", is_text=True, terminal="arm")
_FINAL = Column("final, 95 % interval", _final_cell, terminal="final [95 %]")
_SPEEDUP = Column("speedup, 95 % interval", _speedup_cell, terminal="speedup [95 %]")
_SHORT = {"both_accuracy": "both right", LENGTH: "tokens"}  # titles that a column has room for


def tables(analysis: Analysis) -> dict[str, Table]:
    """Return every table of a report by name, in the order of the page."""
    makers = (arms_table, costs_table, pairs_table, speedup_table, ablations_table, curves_table, runs_table)
    return {table.name: table for table in (make(analysis) for make in (*makers, config_table))}


def arms_table(analysis: Analysis) -> Table:
    """A row for each arm: its settings, first and final score, time to the level, and seconds per step."""
    rows = tuple(_arm_row(analysis, arm) for arm in analysis.arms)
    unit = unit_for(max((final.final_seconds for final in analysis.finals.values()), default=0.0))
    columns = [_ARM]
    if len({row["task"] for row in rows if row["task"]}) > 1:
        columns.append(Column("task", "task", is_text=True, terminal="task"))
    columns += [Column("start", "start"), _FINAL, Column("peak", "peak")]
    if len({final.final_due for final in analysis.finals.values()}) > 1:
        columns.append(Column("at", lambda row: duration(row.get("final_due", math.nan), unit), terminal="at"))
        note = "Scores are at the time that “at” gives; peaks are the highest until then."
    else:
        note = f"Scores are at {duration(analysis.horizon)} of training; peaks are the highest until then."
    if any(arm.is_single and not math.isnan(analysis.finals[arm.name].error) for arm in analysis.arms):
        note += " ± is 1.96 standard errors of the evaluation of a single run."
    if analysis.speedups and analysis.baseline:
        level = "to\u00a099\u00a0%"
        columns += [Column(level, lambda row: _time_to_level(row, unit), terminal=level), _SPEEDUP]
        note += f" “99 %” is 99 % of {analysis.baseline.label}’s peak, and the speedup is to that level."
    others = analysis.metrics[1:]
    columns += [Column(_SHORT.get(name, words(name)), name, 1 if name == LENGTH else 3) for name in others]
    columns.append(Column("runs", _runs_cell, terminal="runs"))
    keys = (
        "arm rule n m runs unfinished task start final final_hours final_runs final_low final_high peak "
        "peak_hours hours_to_p99 speedup ci_low ci_high never_reached problem steps seconds_per_step "
        "settled evaluation_se"
    )
    names = (*keys.split(), *PHASES, "other", *others)
    return Table("final", f"Arms: {words(analysis.metric)}", names, tuple(columns), rows, note)


def costs_table(analysis: Analysis) -> Table:
    """A row for each arm: its steps, and the seconds of a step by phase. On the page only: final.csv has them."""
    rows = tuple(_arm_row(analysis, arm) for arm in analysis.arms if arm.name in analysis.costs)
    phases = [Column(phase, phase, 4) for phase in (*PHASES, "other")]
    columns = (_ARM, Column("steps", "steps", 0), Column("s/step", "seconds_per_step"), *phases)
    note = "Evaluation is not in the training clock; “other” is the time outside all phases."
    return Table("costs", "Seconds per step", (), columns, rows, note)


def _arm_row(analysis: Analysis, arm: Arm) -> Row:
    final, cost = analysis.finals.get(arm.name), analysis.costs.get(arm.name)
    result = analysis.speedup_of(arm.name)
    n, m = rollouts_of(arm.config)
    row: Row = {"arm": arm.name, "label": arm.label, "rule": arm.config.get("rule"), "n": n, "m": m}
    task = next((task_of(run).get("name") for run in arm.runs if task_of(run)), None)
    row |= {"runs": arm.run_count, "arm_time": math.nan, "unfinished": arm.unfinished}
    row["task"] = plain(task or arm.config.get("task") or "")
    for name, curve in arm.curves.items():
        if curve is not arm.curve:
            at = curve.last(final.final_due if final else math.inf)
            row[name] = math.nan if at is None else float(curve.mean[at])
    if cost:
        row |= vars(cost) | cost.phases
    if final:
        row |= vars(final) | {"evaluation_se": final.error, "final_low": final.low, "final_high": final.high}
        row |= {"final_hours": final.final_seconds / HOUR, "peak_hours": final.peak_seconds / HOUR}
    if result:
        row |= _speedup_row(result) | {"hours_to_p99": _hours(result.arm_time), "runs": arm.run_count}
        row["settled"] = None if arm is analysis.baseline else result.settled
    return row


def _speedup_row(result: Speedup) -> Row:
    return vars(result) | {"never_reached": result.never_reached}


def _hours(seconds: float) -> float | None:
    return seconds / HOUR if math.isfinite(seconds) else None


def pairs_table(analysis: Analysis) -> Table:
    """A row for each pair of arms: the difference of their final scores, and the speedup to the other's level."""
    rows = []
    for pair in analysis.pairs:
        row = _speedup_row(pair.speedup) | vars(pair.difference)
        row |= {"arm": pair.arm.name, "label": pair.arm.label, "other": pair.other.name, "against": pair.other.label}
        row |= {"difference": pair.difference.mean, "settled": pair.difference.settled}
        row |= {"hours": pair.due / HOUR, "due": pair.due, "score": pair.score, "other_score": pair.other_score}
        row |= {"runs": pair.runs, "other_runs": pair.other_runs}
        row |= {"speedup_settled": pair.speedup.settled}
        rows.append(row)
    unit = unit_for(max((pair.due for pair in analysis.pairs), default=0.0))

    def settled(row: Row) -> str:
        known = [what for what, key in (("score", "settled"), ("speedup", "speedup_settled")) if row[key]]
        order = {1: ", but every run is above", -1: ", but every run is below"}.get(row["side"], "")
        return (" and ".join(known) or "neither") + ("" if row["settled"] else order)

    difference = Column("difference, 95 % interval", _with_interval("difference", "low", "high", 3))
    columns = (
        _ARM,
        Column("against", "against", is_text=True),
        Column("at", lambda row: duration(row["due"], unit)),
        difference,
        _SPEEDUP,
        Column("settled", settled),
        Column("interval", _pairing, is_text=True),
    )
    keys = (
        "arm other hours score other_score runs other_runs difference low high paired settled "
        "speedup ci_low ci_high speedup_settled"
    )
    note = (
        "The difference is of the scores at the last time at which both arms have them. "
        "Of many pairs, some are settled by chance."
    )
    return Table("pairs", "Pairs of arms", tuple(keys.split()), columns, tuple(rows), note)


def _pairing(row: Row) -> str:
    if math.isnan(row["low"]):
        return "–"
    return "paired by seed" if row["paired"] else "unpaired"


def speedup_table(analysis: Analysis) -> Table:
    """Both criteria, with and without interpolation. A CSV only."""
    rows = tuple(
        _speedup_row(result)
        | {"arm": arm, "baseline_hours": _hours(result.baseline_time), "arm_hours": _hours(result.arm_time)}
        for arm, results in analysis.speedups.items()
        for result in results
    )
    keys = "arm criterion interpolated threshold baseline_hours arm_hours speedup ci_low ci_high never_reached problem"
    return Table("speedup", "Time to the baseline’s level", tuple(keys.split()), (), rows)


def curves_table(analysis: Analysis) -> Table:
    """Every checkpoint of every arm. A CSV only."""
    keys = ("arm", "metric", "due_hours", "hours", "runs", "mean", "low", "high")
    rows = []
    for arm in analysis.arms:
        for name, curve in arm.curves.items():
            present = (curve.scores == curve.scores).sum(axis=0)
            columns = (curve.due / HOUR, curve.times / HOUR, present, curve.mean, *t_band(curve.scores, curve.errors))
            cells = zip(*(column.tolist() for column in columns), strict=True)
            rows += [dict(zip(keys, (arm.name, name, *values), strict=True)) for values in cells]
    return Table("curves", "Scores over time", keys, (), tuple(rows))


def ablations_table(analysis: Analysis) -> Table:
    """A row for each value of each setting that was varied."""
    rows = tuple(
        _arm_row(analysis, arm) | {"setting": AXES[ablation.axis], "axis": ablation.axis, "value": value}
        for ablation in analysis.ablations
        for arm, value in zip(ablation.arms, ablation.values, strict=True)
    )
    columns = [Column("setting", "setting", is_text=True), Column("value", "value", is_text=True), _ARM]
    columns += [_FINAL, Column("peak", "peak")]
    columns += [_SPEEDUP] if analysis.speedups else []
    columns += [Column("s/step", "seconds_per_step")] if analysis.costs else []
    keys = "axis value arm runs final low high peak speedup ci_low ci_high seconds_per_step"
    reference = analysis.ablations[0].reference.label if analysis.ablations else ""
    note = f"Arms that differ in one setting from {reference}. Rows follow m: batches are compared in prompts."
    return Table("ablations", "Ablations", tuple(keys.split()), tuple(columns), rows, note)


def runs_table(analysis: Analysis) -> Table:
    """Every run with its state; those that did not finish come first."""
    rows = [_run_row(arm, run, analysis.metric) for arm in analysis.arms for run in arm.runs]
    rows.sort(key=lambda row: row["state"] == "finished")
    columns = (
        _ARM,
        *(Column(key, key, is_text=True) for key in ("run", "state", "reason")),
        Column("steps", "steps", 0),
        Column("trained for", lambda row: duration(row["seconds"])),
        Column("evaluations", "evaluations"),
        Column(f"last {words(analysis.metric)}", "last_score"),
    )
    keys = "arm run seed state reason steps seconds evaluations last_score device device_name processor dtype"
    states = ", ".join(f"{count} {state}" for state, count in Counter(row["state"] for row in rows).most_common())
    note = f"{counted(len(rows), 'run')}: {states or 'none'}. A run that was killed may still say running."
    return Table("runs", "Runs", tuple(keys.split()), columns, tuple(rows), note)


def _run_row(arm: Arm, run: Run, metric: str) -> Row:
    scores = [score for row in run.evals if (score := finite(row.get(metric))) is not None]
    seconds = finite(run.status.get("seconds"))
    return {
        "arm": arm.name,
        "label": arm.label,
        "run": plain(run.path.name),
        "seed": run.seed,
        "state": plain(run.state),
        "reason": plain(run.status.get("reason") or "", limit=200),
        "steps": finite(run.status.get("step")),
        "seconds": math.nan if seconds is None else seconds,
        "evaluations": len(scores),
        "last_score": scores[-1] if scores else math.nan,
        "device": plain(run.environment.get("device") or ""),
        "device_name": plain(run.environment.get("device_name") or ""),
        "processor": plain(run.environment.get("processor") or ""),
        "dtype": plain(run.environment.get("precision") or ""),
    }


def config_table(analysis: Analysis) -> Table:
    """The settings in which the arms differ: a row for each arm."""
    arms = [arm for arm in analysis.arms if arm.config]
    settings = sorted({key for arm in arms for key in arm.config} - OWN_TO_A_RUN - {"arm", "label"}, key=str)
    differ = [key for key in settings if len({_setting(arm.config, key) for arm in arms}) > 1]
    rows = tuple(
        {"arm": arm.name, "label": arm.label} | {key: _setting(arm.config, key) for key in differ}
        for arm in (arms if differ else [])
    )
    columns = (_ARM, *(Column(plain(key), key, is_text=True) for key in differ))
    note = "From the recipe of each arm’s first run. The config.yaml of any run has what all arms share."
    return Table("config", "What differs between the arms", ("arm", *differ), columns, rows, note)


def _setting(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key, "(not set)")
    return plain(value if isinstance(value, str) else in_order(value), limit=120)
