"""Tables of what the runs were and cost: seconds by phase, states, settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .ablations import in_order
from .analysis import PHASES, Analysis
from .arms import OWN_TO_A_RUN
from .curves import finite
from .missing_runs import Missing
from .tables import Column, Row, Table, name_of, text_of
from .text import duration, plain
from .wording import words


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
        Column("arm", name_of, is_text=True),
        *(Column(part, text_of(part, 4)) for part in parts),
        Column("seconds a step", text_of("seconds_per_step", 4)),
    )
    note = (
        "The mean over the steps of a run, then over the runs of an arm. Evaluation is not in the training clock. "
        "“other” is what no phase accounts for."
    )
    keys = ("arm", "steps", "seconds_per_step", *parts)
    return Table("phases", "Seconds of a step, by phase", keys, columns, tuple(rows), note)


def runs_table(analysis: Analysis) -> Table:
    """Every run, with its state: none is left out."""
    rows: list[Row] = []
    for arm in analysis.arms:
        own: Row = {"arm": arm.name, "label": arm.label}
        rows += [own | _missing_row(missing) for missing in arm.missing]
        for run in arm.runs:
            scores = [score for row in run.evals if (score := finite(row.get(analysis.metric))) is not None]
            status, about = run.status, run.environment
            rows.append(
                own
                | {
                    "run": plain(run.path.name),
                    "seed": run.seed,
                    "state": plain(run.state),
                    "reason": plain(status.get("reason") or "", limit=200),
                    "steps": finite(status.get("step")),
                    "seconds": finite(status.get("seconds")) or math.nan,
                    "evaluations": len(scores),
                    "last_score": scores[-1] if scores else math.nan,
                    "device": plain(about.get("device") or ""),
                    "dtype": plain(about.get("dtype") or ""),
                }
            )
    columns = (
        Column("arm", name_of, is_text=True),
        Column("run", lambda row: row["run"], is_text=True),
        Column("state", lambda row: row["state"], is_text=True),
        Column("reason", lambda row: row["reason"], is_text=True),
        Column("steps", text_of("steps", 0)),
        Column("trained for", lambda row: duration(row["seconds"])),
        Column("evaluations", text_of("evaluations")),
        Column(f"last {words(analysis.metric)}", text_of("last_score")),
    )
    keys = "arm run seed state reason steps seconds evaluations last_score device dtype"
    ended_well_last = tuple(sorted(rows, key=lambda row: row["state"] == "finished"))
    note = (
        f"{states_of(analysis)}. “trained for” is the training clock, without evaluation; the state is what the run "
        "said of itself last, so that one killed without warning may say running."
    )
    return Table("runs", "Runs", tuple(keys.split()), columns, tuple(rows), note, shown=ended_well_last)


def _missing_row(missing: Missing) -> Row:
    blank = {"steps": None, "seconds": math.nan, "evaluations": 0, "last_score": math.nan, "device": "", "dtype": ""}
    row: Row = {"run": f"seed-{missing.seed}", "seed": missing.seed, "state": "missing", "reason": missing.reason}
    return row | blank


def states_of(analysis: Analysis) -> str:
    """``6 runs: 4 finished, 1 failed, 1 missing``."""
    states = Counter(plain(run.state) for arm in analysis.arms for run in arm.runs)
    states += Counter({"missing": sum(len(arm.missing) for arm in analysis.arms)})
    total = sum(states.values())
    parts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return f"{total} run{'' if total == 1 else 's'}: {parts}" if total else "No runs"


def config_table(analysis: Analysis) -> Table:
    """The settings in which the arms differ: a row each, and for a reader of many arms a row for each arm."""
    arms = [arm for arm in analysis.arms if arm.config]
    settings = sorted({key for arm in arms for key in arm.config} - OWN_TO_A_RUN, key=str)
    values = {key: [_setting(arm.config, key) for arm in arms] for key in settings}
    differing = {key: row for key, row in values.items() if len(set(row)) > 1}
    places = [f"arm_{index}" for index in range(len(arms))]
    rows = tuple({"setting": plain(key), **dict(zip(places, row, strict=True))} for key, row in differing.items())
    note = "From the recipe of each arm’s first run; what all arms share is in the config.yaml of any run."
    title, header = "What differs between the arms", ("setting", *(arm.name for arm in arms))
    keys = ("setting", *places)
    if len(arms) <= max(len(rows), 4):
        columns = [Column("setting", text_of("setting"), is_text=True)]
        columns += [Column(arm.label, text_of(place), is_text=True) for arm, place in zip(arms, places, strict=True)]
        return Table("config", title, keys, tuple(columns), rows, note, header)
    columns = [Column("arm", name_of, is_text=True)]
    columns += [Column(row["setting"], text_of(f"setting_{index}"), is_text=True) for index, row in enumerate(rows)]
    shown = tuple(
        {"label": arm.label, **{f"setting_{index}": row[place] for index, row in enumerate(rows)}}
        for arm, place in zip(arms, places, strict=True)
    )
    return Table("config", title, keys, tuple(columns), rows, note, header, shown if rows else ())


def _setting(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return "(not set)"
    value = config[key]
    return plain(value if isinstance(value, str) else in_order(value), limit=120)
