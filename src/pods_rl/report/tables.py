"""Tables of arms and speedups: each once, as CSV (raw values), Markdown and cells for HTML and the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .analysis import Analysis
from .arms import HOUR, Arm, rollouts_of
from .text import duration, encodable, interval, markdown, number, unit_for
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
    shown: tuple[Row, ...] | None = None  # for a reader, where it is not the rows

    def cells(self) -> list[list[str]]:
        """What a reader sees; none for a table that is a CSV only and has no columns."""
        rows = self.rows if self.shown is None else self.shown
        return [[encodable(column.show(row)) for column in self.columns] for row in rows if self.columns]

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


def text_of(key: str, digits: int = 3) -> Callable[[Row], str]:
    return lambda row: number(row.get(key), digits)


def name_of(row: Row) -> str:
    return str(row["label"])


def arms_table(analysis: Analysis) -> Table:
    """One row an arm: what it was, where it started and ended, how soon it got there and what a step cost."""
    rows = tuple(_arm_row(analysis, arm) for arm in analysis.arms)
    unit = unit_for(analysis.horizon)
    columns = [
        Column("arm", name_of, is_text=True),
        Column("start", text_of("start")),
        Column("final, 95 % interval", with_interval("final", "final_low", "final_high", 3)),
        Column("peak", text_of("peak")),
    ]
    if any(not math.isnan(row["format_accuracy"]) for row in rows):
        columns.append(Column("final format", text_of("format_accuracy")))
    if analysis.speedups:
        columns += [
            Column("to\u00a099\u00a0%", lambda row: duration(row["arm_time"], unit)),
            Column("speedup, 95 % interval", with_interval("speedup", "ci_low", "ci_high", 2)),
        ]
    columns.append(Column("runs", text_of("runs")))
    if analysis.costs:
        columns += [Column("steps", text_of("steps", 0)), Column("s/step", text_of("seconds_per_step", 3))]
    keys = (
        "arm rule n m runs start final final_hours final_runs final_low final_high bootstrap_low bootstrap_high peak "
        "peak_hours format_accuracy hours_to_p99 speedup ci_low ci_high never_reached steps seconds_per_step"
    )
    title = f"Arms: {words(analysis.metric)}"
    base = f" 99 % is of {analysis.baseline.label}’s peak." if analysis.speedups and analysis.baseline else ""
    note = (
        f"Means over runs. Final scores are those at {duration(analysis.horizon)} of training, peaks the highest mean "
        f"until then; intervals of scores are 1.96 standard errors over runs, those of speedups a bootstrap.{base}"
    )
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
        "arm_time": math.nan,
    }
    if final:
        row |= vars(final) | {"final_low": final.low, "final_high": final.high}
        row |= {"final_hours": final.final_seconds / HOUR, "peak_hours": final.peak_seconds / HOUR}
    if result:
        row |= vars(result) | {"hours_to_p99": hours_of(result.arm_time)}
    return row


def with_interval(value: str, low: str, high: str, digits: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        spread = interval(row.get(low, math.nan), row.get(high, math.nan), digits)
        never = value == "speedup" and row.get("arm_time") == math.inf
        score = "never" if never else number(row.get(value), digits)
        return score if spread == "–" or spread == "[0.00, 0.00]" else f"{score} {spread}"

    return show


def hours_of(seconds: float) -> float | None:
    return seconds / HOUR if math.isfinite(seconds) else None


def speedup_table(analysis: Analysis) -> Table:
    """Both criteria, with and without interpolation: a row of the CSV for each, a line for a reader of all."""
    labels = {arm.name: arm.label for arm in analysis.arms}
    rows = tuple(
        vars(result)
        | {"arm": arm, "baseline_hours": hours_of(result.baseline_time), "arm_hours": hours_of(result.arm_time)}
        for (arm, _, _), result in analysis.speedups.items()
    )
    base = analysis.baseline
    shown = tuple(
        {"label": labels[arm.name], "result": {key: analysis.speedup_of(arm.name, *key) for key in _RULES}}
        for arm in analysis.arms
        if arm is not base and analysis.speedup_of(arm.name)
    )
    unit = unit_for(analysis.horizon)
    columns = [
        Column("arm", name_of, is_text=True),
        Column("to\u00a099\u00a0%", lambda row: duration(row["result"]["p99", False].arm_time, unit)),
    ]
    for criterion, goal in (("p99", "99\u00a0%"), ("peak", "peak")):
        columns += [
            Column(f"speedup to {goal}", _speedup_cell(criterion, False)),
            Column(f"{goal}, at the crossing", _speedup_cell(criterion, True)),
            Column("never", _never_cell(criterion)),
        ]
    keys = "arm criterion interpolated threshold baseline_hours arm_hours speedup ci_low ci_high never_reached"
    note = _speedup_note(analysis, unit)
    return Table("speedup", "Time to the baseline’s level", tuple(keys.split()), tuple(columns), rows, note, (), shown)


_RULES = (("p99", False), ("p99", True), ("peak", False), ("peak", True))


def _speedup_cell(criterion: str, interpolated: bool) -> Callable[[Row], str]:
    show = with_interval("speedup", "ci_low", "ci_high", 2)
    return lambda row: show(vars(row["result"][criterion, interpolated]))


def _never_cell(criterion: str) -> Callable[[Row], str]:
    return lambda row: _percent(row["result"][criterion, False].never_reached)


def _speedup_note(analysis: Analysis, unit: str) -> str:
    base = analysis.baseline
    p99, peak = (analysis.speedup_of(base.name, c) if base else None for c in ("p99", "peak"))
    if base is None or p99 is None or peak is None:
        return ""
    return (
        f"99 % of {base.label}’s peak is {number(p99.threshold, 4)}, which it reaches at "
        f"{duration(p99.arm_time, unit)}; the peak is {number(peak.threshold, 4)}, at "
        f"{duration(peak.arm_time, unit)}. Speedup is its time over the "
        "arm’s, at the first checkpoint that reaches the score, and at the linear crossing before it; in brackets 95 % "
        "bootstrap intervals over runs. “never” is the share of resamples that do not reach it: they count as 0."
    )


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"
