"""Tables of arms and speedups: each once, as CSV (raw values), Markdown and cells for HTML and the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .analysis import Analysis, Final
from .arms import Arm, rollouts_of
from .curves import HOUR
from .statistics import Z_95
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
        Column(
            "final, 95 % interval" if any(not math.isnan(row.get("final_low", math.nan)) for row in rows) else "final",
            _final_cell,
        ),
        Column("peak", text_of("peak")),
    ]
    if any(not math.isnan(row["format_accuracy"]) for row in rows):
        columns.append(Column("final format", text_of("format_accuracy")))
    if analysis.speedups:
        columns += [
            Column("to\u00a099\u00a0%", lambda row: duration(row["arm_time"], unit)),
            Column(speedup_title(analysis), with_interval("speedup", "ci_low", "ci_high", 2)),
        ]
    columns.append(Column("runs", text_of("runs")))
    if analysis.costs:
        columns += [Column("steps", text_of("steps", 0)), Column("s/step", text_of("seconds_per_step", 3))]
    keys = (
        "arm rule n m runs start final final_hours final_runs final_low final_high bootstrap_low bootstrap_high peak "
        "peak_hours format_accuracy hours_to_p99 speedup ci_low ci_high never_reached steps seconds_per_step "
        "reached_low reached_high settled evaluation_se"
    )
    title = f"Arms: {words(analysis.metric)}"
    return Table("final", title, tuple(keys.split()), tuple(columns), rows, _arms_note(analysis))


def _arms_note(analysis: Analysis) -> str:
    """What the columns of the table of arms are, for those that it has."""
    several = any(arm.curve and len(arm.curve.runs) > 1 for arm in analysis.arms)
    note = (
        f"{'Means over runs. ' if several else ''}Final scores are those at {duration(analysis.horizon)} of training, "
    )
    note += f"peaks the highest {'mean' if several else 'score'} until then."
    if several:
        note += " Intervals of scores are 1.96 standard errors over runs"
        note += ", those of speedups a bootstrap." if has_intervals(analysis) else "."
    if any(arm.run_count == 1 and not math.isnan(final.error) for arm, final in _ends(analysis)):
        note += " ± is 1.96 standard errors of the evaluation of a single run."
    if not analysis.speedups or analysis.baseline is None:
        return note
    results = {arm.label: analysis.speedup_of(arm.name) for arm in analysis.arms if arm is not analysis.baseline}
    unsettled = [label for label, result in results.items() if result and not result.settled]
    note += f" 99 % is of {analysis.baseline.label}’s peak."
    return note + (f" Speedups not settled: {', '.join(unsettled)}." if unsettled else "")


def _ends(analysis: Analysis) -> list[tuple[Arm, Final]]:
    return [(arm, analysis.finals[arm.name]) for arm in analysis.arms if arm.name in analysis.finals]


def has_intervals(analysis: Analysis) -> bool:
    """Whether any speedup has an interval: both arms have several runs."""
    return any(not math.isnan(result.ci_low) for result in analysis.speedups.values())


def speedup_title(analysis: Analysis) -> str:
    return "speedup, 95 % interval" if has_intervals(analysis) else "speedup"


def _final_cell(row: Row) -> str:
    """The final score with its interval over runs, else with what the evaluation alone leaves open."""
    shown = with_interval("final", "final_low", "final_high", 3)(row)
    error = row.get("error", math.nan)
    return shown if row["runs"] != 1 or math.isnan(error) else f"{shown} ±{number(Z_95 * error)}"


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
        row |= vars(final) | {"evaluation_se": final.error, "final_low": final.low, "final_high": final.high}
        row |= {"final_hours": final.final_seconds / HOUR, "peak_hours": final.peak_seconds / HOUR}
    if result:
        row |= vars(result) | {"hours_to_p99": hours_of(result.arm_time)}
        row["settled"] = None if arm is analysis.baseline else result.settled
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
    for criterion, goal in (("p99", "99\u00a0%"), ("peak", "the\u00a0peak")):
        columns += [
            Column(f"speedup to {goal}", _speedup_cell(criterion, False)),
            Column(f"to {goal}, at the crossing", _speedup_cell(criterion, True)),
        ]
        if has_intervals(analysis):
            columns.append(Column(f"never reach {goal}", _never_cell(criterion)))
    keys = "arm criterion interpolated threshold baseline_hours arm_hours speedup ci_low ci_high never_reached"
    note = _speedup_note(analysis, unit)
    return Table("speedup", "Time to the baseline’s level", tuple(keys.split()), tuple(columns), rows, note, (), shown)


_RULES = (("p99", False), ("p99", True), ("peak", False), ("peak", True))


def _speedup_cell(criterion: str, interpolated: bool) -> Callable[[Row], str]:
    show = with_interval("speedup", "ci_low", "ci_high", 2)
    return lambda row: show(vars(row["result"][criterion, interpolated]))


def _never_cell(criterion: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        result = row["result"][criterion, False]
        share, others = _percent(result.never_reached), interval(result.reached_low, result.reached_high)
        return f"{share}; others {others}" if result.never_reached > 0 and others != "–" else share

    return show


def _speedup_note(analysis: Analysis, unit: str) -> str:
    base = analysis.baseline
    p99, peak = (analysis.speedup_of(base.name, c) if base else None for c in ("p99", "peak"))
    if base is None or p99 is None or peak is None:
        return ""
    note = (
        f"99 % of {base.label}’s peak is {number(p99.threshold, 4)}, which it reaches at "
        f"{duration(p99.arm_time, unit)}; the peak is {number(peak.threshold, 4)}, at "
        f"{duration(peak.arm_time, unit)}. Speedup is its time over the "
        "arm’s, at the first checkpoint that reaches the score, and at the linear crossing before it"
    )
    if not has_intervals(analysis):
        return f"{note}. No interval can be given: it takes two runs of the baseline and of the arm."
    return (
        f"{note}; in brackets 95 % bootstrap intervals over runs. “never reach” is the share of resamples in which the "
        "arm never reaches the level. They count as 0 in the interval; “others” is the interval of the rest."
    )


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"
