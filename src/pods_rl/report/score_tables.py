"""Tables of scores: every metric at the end, every checkpoint, and the ablations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .analysis import Analysis
from .arms import Arm
from .curves import HOUR, LENGTH
from .statistics import normal_band
from .tables import Column, Row, Table, name_of, speedup_title, text_of, with_interval
from .text import duration
from .wording import words


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
    columns = [Column("arm", name_of, is_text=True)]
    for name in metrics:
        digits = 1 if name == LENGTH else 3
        show = with_interval(name, f"{name}_low", f"{name}_high", digits)
        columns.append(Column(words(name), show))
    keys = ["arm", "runs", *(f"{name}{end}" for name in metrics for end in ("", "_low", "_high"))]
    note = f"At {duration(analysis.horizon)} of training."
    if any(arm.curve and len(arm.curve.runs) > 1 for arm in analysis.arms):
        note = f"Means over runs at {duration(analysis.horizon)} of training, with 1.96 standard errors over runs."
    shown = tuple(rows) if len(metrics) > 1 else ()  # one metric is in the table of arms already
    return Table("scores", "Final scores", tuple(keys), tuple(columns), tuple(rows), note, shown=shown)


def curves_table(analysis: Analysis) -> Table:
    """Every checkpoint of every arm: what the figures over training time draw. A CSV only."""
    rows = tuple(row for arm in analysis.arms for row in _checkpoints(arm, analysis.metric))
    keys = "arm metric due_hours hours runs mean low high"
    return Table("curves", "Scores over time", tuple(keys.split()), (), rows)


def _checkpoints(arm: Arm, metric: str) -> Iterator[Row]:
    for name, curve in arm.curves(metric).items():
        low, high = normal_band(curve.scores)
        present = (~(curve.scores != curve.scores)).sum(axis=0)
        for at, due in enumerate(curve.due):
            yield {
                "arm": arm.name,
                "metric": name,
                "due_hours": float(due) / HOUR,
                "hours": float(curve.times[at]) / HOUR,
                "runs": int(present[at]),
                "mean": float(curve.mean[at]),
                "low": float(low[at]),
                "high": float(high[at]),
            }


def ablations_table(analysis: Analysis) -> Table:
    """A row for each value of each setting that was varied."""
    rows = []
    for ablation in analysis.ablations:
        for arm, value in zip(ablation.arms, ablation.values, strict=True):
            row: Row = {"setting": ablation.title, "axis": ablation.axis, "held": ablation.held}
            row |= {"value": value, "arm": arm.name, "label": arm.label, "runs": arm.run_count}
            if final := analysis.finals.get(arm.name):
                row |= {"final": final.final, "low": final.low, "high": final.high, "peak": final.peak}
            if result := analysis.speedup_of(arm.name):
                row |= vars(result)
            cost = analysis.costs.get(arm.name)
            row["seconds_per_step"] = cost.seconds_per_step if cost else math.nan
            rows.append(row)
    columns = [
        Column("setting", text_of("setting"), is_text=True),
        Column("value", text_of("value"), is_text=True),
        Column("arm", name_of, is_text=True),
        Column("final, 95 % interval", with_interval("final", "low", "high", 3)),
        Column("peak", text_of("peak")),
    ]
    if analysis.speedups:
        columns.append(Column(speedup_title(analysis), with_interval("speedup", "ci_low", "ci_high", 2)))
    if analysis.costs:
        columns.append(Column("s/step", text_of("seconds_per_step")))
    keys = "axis value arm runs held final low high peak speedup ci_low ci_high seconds_per_step"
    note = (
        "Arms that differ in one setting from "
        + (analysis.ablations[0].reference.label if analysis.ablations else "")
        + "; rows follow m, so that the prompts of a step stay the same. An arm that keeps all it generates is GRPO, "
        "whatever its rule. Scores and speedups are those of the tables above."
    )
    return Table("ablations", "Ablations", tuple(keys.split()), tuple(columns), tuple(rows), note)
