"""The tables of a report: each once, as CSV (raw values), Markdown, and cells for HTML and the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .analysis import Analysis
from .arms import Arm, rollouts_of
from .curves import HOUR, LENGTH
from .speedups import Speedup
from .statistics import Z_95, normal_band
from .text import duration, encodable, interval, markdown, number, unit_for, words

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A displayed column: a key of the row, or a function that makes a cell from a row."""

    title: str
    show: str | Callable[[Row], str]
    digits: int = 3
    is_text: bool = False

    def cell(self, row: Row) -> str:
        return encodable(number(row.get(self.show), self.digits) if isinstance(self.show, str) else self.show(row))


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    keys: tuple[str, ...]  # of a row, in the order of the CSV
    columns: tuple[Column, ...]  # none in a table that is a CSV only
    rows: tuple[Row, ...]
    note: str = ""
    header: tuple[str, ...] = ()  # of the CSV, if it is not the keys
    shown: tuple[Row, ...] | None = None  # displayed rows, if they differ from the CSV's

    def cells(self) -> list[list[str]]:
        """The displayed cells."""
        rows = self.rows if self.shown is None else self.shown
        return [[column.cell(row) for column in self.columns] for row in rows if self.columns]

    def to_csv(self) -> str:
        """Raw values; a missing value is an empty field, a bool is true or false."""
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


ARM = Column("arm", "label", is_text=True)


def arms_table(analysis: Analysis) -> Table:
    """A row for each arm: its settings, first and final score, time to the level, and seconds per step."""
    rows = tuple(_arm_row(analysis, arm) for arm in analysis.arms)
    unit = unit_for(analysis.horizon)
    has_bands = any(not math.isnan(final.low) for final in analysis.finals.values())
    columns = [
        ARM,
        Column("start", "start"),
        Column("final, 95 % interval" if has_bands else "final", _final_cell),
        Column("peak", "peak"),
    ]
    if any(not math.isnan(row["format_accuracy"]) for row in rows):
        columns.append(Column("final format", "format_accuracy"))
    if analysis.speedups:
        columns.append(Column("to\u00a099\u00a0%", lambda row: duration(row["arm_time"], unit)))
        columns.append(_speedup_column(analysis))
    columns.append(Column("runs", "runs"))
    if analysis.costs:
        columns += [Column("steps", "steps", 0), Column("s/step", "seconds_per_step")]
    keys = (
        "arm rule n m runs start final final_hours final_runs final_low final_high bootstrap_low bootstrap_high peak "
        "peak_hours format_accuracy hours_to_p99 speedup ci_low ci_high never_reached steps seconds_per_step "
        "reached_low reached_high settled evaluation_se"
    )
    title = f"Arms: {words(analysis.metric)}"
    return Table("final", title, tuple(keys.split()), tuple(columns), rows, _arms_note(analysis))


def _arms_note(analysis: Analysis) -> str:
    """Return a note on the columns that the table of arms has."""
    several = any(arm.curve and not arm.is_single for arm in analysis.arms)
    note = "Means over runs. " if several else ""
    note += f"Final scores are at {duration(analysis.horizon)} of training; "
    note += f"peaks are the highest {'mean' if several else 'score'} until then."
    if several:
        note += " Intervals of scores are 1.96 standard errors over runs"
        note += "; those of speedups are a bootstrap." if analysis.has_intervals else "."
    if any(arm.is_single and not math.isnan(analysis.finals[arm.name].error) for arm in analysis.arms):
        note += " ± is 1.96 standard errors of the evaluation of a single run."
    if not analysis.speedups or analysis.baseline is None:
        return note
    results = {arm.label: analysis.speedup_of(arm.name) for arm in analysis.arms if arm is not analysis.baseline}
    unsettled = [label for label, result in results.items() if result and not result.settled]
    note += f" “99 %” is 99 % of {analysis.baseline.label}’s peak."
    return note + (f" Speedups not settled: {', '.join(unsettled)}." if unsettled else "")


def _speedup_column(analysis: Analysis) -> Column:
    title = "speedup, 95 % interval" if analysis.has_intervals else "speedup"
    return Column(title, _with_interval("speedup", "ci_low", "ci_high", 2))


def _final_cell(row: Row) -> str:
    """The final score with its interval over runs, or for a single run with the error of its evaluation."""
    shown = _with_interval("final", "low", "high", 3)(row)
    error = row.get("error", math.nan)
    return shown if row["runs"] != 1 or math.isnan(error) else f"{shown} ±{number(Z_95 * error)}"


def _arm_row(analysis: Analysis, arm: Arm) -> Row:
    final, cost = analysis.finals.get(arm.name), analysis.costs.get(arm.name)
    result = analysis.speedup_of(arm.name)
    n, m = rollouts_of(arm.config)
    shown = arm.other_curves.get("format_accuracy")
    row: Row = {
        "arm": arm.name,
        "label": arm.label,
        "rule": arm.config.get("rule"),
        "n": n,
        "m": m,
        "runs": arm.run_count,
        "format_accuracy": float(shown.mean[shown.last(analysis.horizon)]) if shown else math.nan,
        "steps": cost.steps if cost else math.nan,
        "seconds_per_step": cost.seconds_per_step if cost else math.nan,
        "arm_time": math.nan,
    }
    if final:
        row |= vars(final) | {"evaluation_se": final.error, "final_low": final.low, "final_high": final.high}
        row |= {"final_hours": final.final_seconds / HOUR, "peak_hours": final.peak_seconds / HOUR}
    if result:
        row |= vars(result) | {"hours_to_p99": _hours(result.arm_time)}
        row["settled"] = None if arm is analysis.baseline else result.settled
    return row


def _with_interval(value: str, low: str, high: str, digits: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        spread = interval(row.get(low, math.nan), row.get(high, math.nan), digits)
        never = value == "speedup" and row.get("arm_time") == math.inf
        score = "never" if never else number(row.get(value), digits)
        return score if spread in ("–", "[0.00, 0.00]") else f"{score} {spread}"

    return show


def _hours(seconds: float) -> float | None:
    return seconds / HOUR if math.isfinite(seconds) else None


def speedup_table(analysis: Analysis) -> Table:
    """Both criteria, with and without interpolation: a row of the CSV for each, one line of all for a reader."""
    rows = tuple(
        vars(result)
        | {"arm": arm, "baseline_hours": _hours(result.baseline_time), "arm_hours": _hours(result.arm_time)}
        for (arm, _, _), result in analysis.speedups.items()
    )
    shown = tuple(
        {"label": arm.label, "results": {key[1:]: s for key, s in analysis.speedups.items() if key[0] == arm.name}}
        for arm in analysis.arms
        if arm is not analysis.baseline and analysis.speedup_of(arm.name)
    )
    unit = unit_for(analysis.horizon)
    columns = [ARM, _result_column("to\u00a099\u00a0%", "p99", False, lambda s: duration(s.arm_time, unit))]
    show = _with_interval("speedup", "ci_low", "ci_high", 2)
    for criterion, goal in (("p99", "99\u00a0%"), ("peak", "the\u00a0peak")):
        columns += [
            _result_column(f"speedup to {goal}", criterion, False, lambda s: show(vars(s))),
            _result_column(f"to {goal}, at the crossing", criterion, True, lambda s: show(vars(s))),
        ]
        if analysis.has_intervals:
            columns.append(_result_column(f"never reach {goal}", criterion, False, _never_cell))
    keys = "arm criterion interpolated threshold baseline_hours arm_hours speedup ci_low ci_high never_reached"
    note = _speedup_note(analysis, unit)
    return Table("speedup", "Time to the baseline’s level", tuple(keys.split()), tuple(columns), rows, note, (), shown)


def _result_column(title: str, criterion: str, interpolated: bool, show: Callable[[Speedup], str]) -> Column:
    return Column(title, lambda row: show(row["results"][criterion, interpolated]))


def _never_cell(result: Speedup) -> str:
    share = "–" if math.isnan(result.never_reached) else f"{100 * result.never_reached:.1f} %"
    others = interval(result.reached_low, result.reached_high)
    return f"{share}; others {others}" if result.never_reached > 0 and others != "–" else share


def _speedup_note(analysis: Analysis, unit: str) -> str:
    base = analysis.baseline
    p99, peak = (analysis.speedup_of(base.name, c) if base else None for c in ("p99", "peak"))
    if base is None or p99 is None or peak is None:
        return ""
    note = (
        f"99 % of {base.label}’s peak is {number(p99.threshold, 4)}, reached at {duration(p99.arm_time, unit)}; "
        f"the peak is {number(peak.threshold, 4)}, reached at {duration(peak.arm_time, unit)}. Speedup is the "
        "baseline’s time over the arm’s, at the first checkpoint that reaches the score, or at the linear "
        "crossing before it"
    )
    if not analysis.has_intervals:
        return f"{note}. No interval can be given: it takes two runs of the baseline and of the arm."
    return (
        f"{note}; in brackets 95 % bootstrap intervals over runs. “never reach” is the share of resamples in which the "
        "arm never reaches the level. They count as 0 in the interval; “others” is the interval of the rest."
    )


def scores_table(analysis: Analysis) -> Table:
    """Each arm's answer accuracy, format accuracy, both, and length, where final scores are compared."""
    rows: list[Row] = []
    metrics: dict[str, None] = {}  # a set in order
    for arm in analysis.arms:
        row: Row = {"arm": arm.name, "label": arm.label, "runs": arm.run_count}
        for name, curve in arm.curves(analysis.metric).items():
            metrics[name] = None
            at = curve.last(analysis.horizon)
            low, high = normal_band(curve.scores)
            row |= {name: float(curve.mean[at]), f"{name}_low": float(low[at]), f"{name}_high": float(high[at])}
        rows.append(row)
    columns = [ARM]
    for name in metrics:
        show = _with_interval(name, f"{name}_low", f"{name}_high", 1 if name == LENGTH else 3)
        columns.append(Column(words(name), show))
    keys = ("arm", "runs", *(f"{name}{end}" for name in metrics for end in ("", "_low", "_high")))
    note = f"At {duration(analysis.horizon)} of training."
    if any(arm.curve and not arm.is_single for arm in analysis.arms):
        note = f"Means over runs at {duration(analysis.horizon)} of training, with 1.96 standard errors over runs."
    shown = tuple(rows) if len(metrics) > 1 else ()  # a single metric is already in the table of arms
    return Table("scores", "Final scores", keys, tuple(columns), tuple(rows), note, shown=shown)


def curves_table(analysis: Analysis) -> Table:
    """Every checkpoint of every arm: what the figures over training time draw. A CSV only."""
    rows = tuple(row for arm in analysis.arms for row in _checkpoints(arm, analysis.metric))
    keys = "arm metric due_hours hours runs mean low high"
    return Table("curves", "Scores over time", tuple(keys.split()), (), rows)


def _checkpoints(arm: Arm, metric: str) -> Iterator[Row]:
    for name, curve in arm.curves(metric).items():
        low, high = normal_band(curve.scores)
        present = (curve.scores == curve.scores).sum(axis=0)
        hours, real = (curve.due / HOUR).tolist(), (curve.times / HOUR).tolist()
        columns = (hours, real, present.tolist(), curve.mean.tolist(), low.tolist(), high.tolist())
        for values in zip(*columns, strict=True):
            cells = dict(zip(("due_hours", "hours", "runs", "mean", "low", "high"), values, strict=True))
            yield {"arm": arm.name, "metric": name, **cells}


def ablations_table(analysis: Analysis) -> Table:
    """A row for each value of each setting that was varied."""
    rows = []
    for ablation in analysis.ablations:
        for arm, value in zip(ablation.arms, ablation.values, strict=True):
            row = _arm_row(analysis, arm)
            row |= {"setting": ablation.title, "axis": ablation.axis, "held": ablation.held, "value": value}
            rows.append(row)
    columns = [
        Column("setting", "setting", is_text=True),
        Column("value", "value", is_text=True),
        ARM,
        Column("final, 95 % interval", _with_interval("final", "low", "high", 3)),
        Column("peak", "peak"),
    ]
    columns += [_speedup_column(analysis)] if analysis.speedups else []
    columns += [Column("s/step", "seconds_per_step")] if analysis.costs else []
    keys = "axis value arm runs held final low high peak speedup ci_low ci_high seconds_per_step"
    reference = analysis.ablations[0].reference.label if analysis.ablations else ""
    note = (
        f"Arms that differ in one setting from {reference}; rows follow m, so the prompts of a step stay the same. An "
        "arm that keeps all it generates is GRPO, whatever its rule. Scores and speedups are those of the tables above."
    )
    return Table("ablations", "Ablations", tuple(keys.split()), tuple(columns), tuple(rows), note)
