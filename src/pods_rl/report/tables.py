"""The report's tables: each once, as CSV (raw values), Markdown and cells for HTML and the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .analysis import PHASES, Analysis
from .arms import HOUR, Arm, finite, rollouts_of
from .text import duration, encodable, interval, markdown, number, plain, unit_for
from .wording import words

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """How a reader sees one column; ``show`` makes a cell of a raw row."""

    title: str
    show: Callable[[Row], str]
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    keys: tuple[str, ...]  # of a row, in the order of the CSV
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""
    header: tuple[str, ...] = ()  # of the CSV, where it is not the keys

    def cells(self) -> list[list[str]]:
        """What a reader sees; a row marked ``csv_only`` is left out."""
        rows = [row for row in self.rows if not row.get("csv_only")]
        return [[encodable(column.show(row)) for column in self.columns] for row in rows]

    def to_csv(self) -> str:
        """Raw values; a value there is none of is an empty field, a bool is true or false."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header or self.keys)
        writer.writerows([[_raw(row.get(key)) for key in self.keys] for row in self.rows])
        return encodable(text.getvalue())

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


def _field(key: str, digits: int = 3) -> Callable[[Row], str]:
    return lambda row: number(row.get(key), digits)


def _name(row: Row) -> str:
    return str(row["label"])


def arms_table(analysis: Analysis) -> Table:
    """One row an arm: what it was, where it started and ended, how soon it got there and what a step cost."""
    rows = tuple(_arm_row(analysis, arm) for arm in analysis.arms)
    unit = unit_for(analysis.horizon)
    columns = [
        Column("arm", _name, is_text=True),
        Column("start", _field("start")),
        Column("final, 95 % interval", _with_interval("final", "final_low", "final_high", 3)),
        Column("peak", _field("peak")),
    ]
    if any(not math.isnan(row["format_accuracy"]) for row in rows):
        columns.append(Column("final format", _field("format_accuracy")))
    if analysis.speedups:
        columns += [
            Column("to\u00a099\u00a0%", lambda row: duration(row["seconds_to_p99"], unit)),
            Column("speedup, 95 % interval", _with_interval("speedup", "ci_low", "ci_high", 2)),
        ]
    columns.append(Column("runs", _field("runs")))
    if analysis.costs:
        columns += [Column("steps", _field("steps", 0)), Column("s/step", _field("seconds_per_step", 3))]
    keys = (
        "arm rule n m runs start final final_hours final_runs final_low final_high bootstrap_low bootstrap_high peak "
        "peak_hours format_accuracy hours_to_p99 speedup ci_low ci_high never_reached steps seconds_per_step"
    )
    title = f"Arms: {words(analysis.metric)}"
    base = f" 99 % is of {analysis.baseline.label}’s peak." if analysis.speedups and analysis.baseline else ""
    note = f"Final scores are those at {duration(analysis.horizon)} of training.{base}"
    return Table("final", title, tuple(keys.split()), tuple(columns), rows, note)


def _arm_row(analysis: Analysis, arm: Arm) -> Row:
    final, cost = analysis.finals.get(arm.name), analysis.costs.get(arm.name)
    result = analysis.speedup_of(arm.name)
    n, m = rollouts_of(arm.config)
    shown = arm.other_curves.get("format_accuracy")
    formats = math.nan if shown is None else float(shown.mean[shown.last(analysis.horizon)])
    row: Row = {
        "arm": arm.name,
        "label": arm.label,
        "rule": arm.config.get("rule"),
        "n": n,
        "m": m,
        "runs": arm.run_count,
        "format_accuracy": formats,
        "steps": cost.steps if cost else math.nan,
        "seconds_per_step": cost.seconds_per_step if cost else math.nan,
        "seconds_to_p99": math.nan,
    }
    if final:
        row |= vars(final) | {"final_low": final.low, "final_high": final.high}
        row |= {"final_hours": final.final_seconds / HOUR, "peak_hours": final.peak_seconds / HOUR}
    if result:
        row |= {"seconds_to_p99": result.arm_time, "hours_to_p99": _hours(result.arm_time)}
        row |= {key: getattr(result, key) for key in ("speedup", "ci_low", "ci_high", "never_reached")}
    return row


def _with_interval(value: str, low: str, high: str, digits: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        spread = interval(row.get(low, math.nan), row.get(high, math.nan), digits)
        never = value == "speedup" and row.get(value) == 0.0
        score = "never" if never else number(row.get(value), digits)
        return score if spread == "–" or spread == "[0.00, 0.00]" else f"{score} {spread}"

    return show


def _hours(seconds: float) -> float | None:
    return seconds / HOUR if math.isfinite(seconds) else None


def speedup_table(analysis: Analysis) -> Table:
    """Both criteria, with and without interpolation, for every arm."""
    rows = []
    labels = {arm.name: arm.label for arm in analysis.arms}
    unit = unit_for(analysis.horizon)
    base = analysis.baseline.name if analysis.baseline else None
    for (arm, _, _), result in analysis.speedups.items():
        rows.append(
            vars(result)
            | {"csv_only": arm == base}
            | {"arm": arm, "label": labels[arm]}
            | {"baseline_hours": _hours(result.baseline_time), "arm_hours": _hours(result.arm_time)}
        )
    keys = "arm criterion interpolated threshold baseline_hours arm_hours speedup ci_low ci_high never_reached"
    columns = (
        Column("arm", _name, is_text=True),
        Column("to reach", lambda row: "99 % of peak" if row["criterion"] == "p99" else "peak", is_text=True),
        Column("time of", lambda row: "crossing" if row["interpolated"] else "checkpoint", is_text=True),
        Column("score", _field("threshold", 4)),
        Column("baseline", lambda row: duration(row["baseline_time"], unit)),
        Column("arm’s time", lambda row: duration(row["arm_time"], unit)),
        Column("speedup, 95 % interval", _with_interval("speedup", "ci_low", "ci_high", 2)),
        Column("never", lambda row: _percent(row["never_reached"])),
    )
    note = (
        "“never” is the share of bootstrap resamples in which the arm does not reach the score; "
        "they count as speedup 0."
    )
    return Table("speedup", "Time to the baseline’s level", tuple(keys.split()), columns, tuple(rows), note)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def phases_table(analysis: Analysis) -> Table:
    """Mean seconds of a step by phase."""
    parts = (*PHASES, "other")
    rows = []
    for arm in analysis.arms:
        cost = analysis.costs.get(arm.name)
        if cost and not math.isnan(cost.seconds_per_step):
            row: Row = {"arm": arm.name, "label": arm.label, "steps": cost.steps, **cost.phases}
            rows.append(row | {"other": cost.other, "seconds_per_step": cost.seconds_per_step})
    columns = (
        Column("arm", _name, is_text=True),
        *(Column(part, _field(part, 4)) for part in parts),
        Column("seconds a step", _field("seconds_per_step", 4)),
    )
    note = "Evaluation is not in the training clock. “other” is what no phase accounts for."
    keys = ("arm", "steps", "seconds_per_step", *parts)
    return Table("phases", "Seconds of a step, by phase", keys, columns, tuple(rows), note)


def runs_table(analysis: Analysis) -> Table:
    """Every run, with its state: none is left out."""
    rows = []
    for arm in analysis.arms:
        for run in arm.runs:
            scores = [score for row in run.evals if (score := finite(row.get(analysis.metric))) is not None]
            status, about = run.status, run.environment
            rows.append(
                {
                    "arm": arm.name,
                    "label": arm.label,
                    "run": plain(run.path.name),
                    "seed": run.seed,
                    "state": plain(run.state),
                    "reason": plain(status.get("reason") or "", limit=200),
                    "steps": status.get("step"),
                    "seconds": finite(status.get("seconds")) or math.nan,
                    "evaluations": len(scores),
                    "last_score": scores[-1] if scores else math.nan,
                    "device": plain(about.get("device") or ""),
                    "dtype": plain(about.get("dtype") or ""),
                }
            )
    columns = (
        Column("arm", _name, is_text=True),
        Column("run", lambda row: row["run"], is_text=True),
        Column("state", lambda row: row["state"], is_text=True),
        Column("reason", lambda row: row["reason"], is_text=True),
        Column("steps", _field("steps", 0)),
        Column("trained for", lambda row: duration(row["seconds"])),
        Column("evaluations", _field("evaluations")),
        Column(f"last {words(analysis.metric)}", _field("last_score")),
    )
    keys = "arm run seed state reason steps seconds evaluations last_score device dtype"
    return Table("runs", "Runs", tuple(keys.split()), columns, tuple(rows))


_OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})


def config_table(analysis: Analysis) -> Table:
    """The settings in which the arms differ."""
    arms = [arm for arm in analysis.arms if arm.config]
    settings = sorted({key for arm in arms for key in arm.config} - _OWN_TO_A_RUN, key=str)
    shown = {key: [_setting(arm.config, key) for arm in arms] for key in settings}
    labels = {f"arm_{index}": arm.label for index, arm in enumerate(arms)}
    rows = tuple(
        {"setting": plain(key), **dict(zip(labels, values, strict=True))}
        for key, values in shown.items()
        if len(set(values)) > 1
    )
    columns = [Column("setting", lambda row: row["setting"], is_text=True)]
    columns += [Column(label, _getter(key), is_text=True) for key, label in labels.items()]
    title, header = "What differs between the arms", ("setting", *(arm.name for arm in arms))
    return Table("config", title, ("setting", *labels), tuple(columns), rows, header=header)


def _getter(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _setting(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return "(not set)"
    value = config[key]
    return plain(value if isinstance(value, str) else json.dumps(value, default=str), limit=120)
