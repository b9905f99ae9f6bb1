"""Tables of runs: seconds by phase, states, settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..runs import Run
from .ablations import in_order
from .analysis import PHASES, Analysis
from .arms import OWN_TO_A_RUN, Missing
from .curves import finite
from .tables import ARM, Column, Row, Table
from .text import duration, plain, plural, words


def phases_table(analysis: Analysis) -> Table:
    """Mean seconds of a step by phase."""
    parts = (*PHASES, "other")
    rows = []
    for arm in analysis.arms:
        cost = analysis.costs.get(arm.name)
        if cost and not math.isnan(cost.seconds_per_step):
            row: Row = {"arm": arm.name, "label": arm.label, "steps": cost.steps, **cost.phases}
            rows.append(row | {"other": cost.other, "seconds_per_step": cost.seconds_per_step})
    columns = (ARM, *(Column(part, part, 4) for part in parts), Column("seconds a step", "seconds_per_step", 4))
    note = (
        "Means over the steps of a run, then over the runs of an arm. Evaluation is not in the training clock. “other” "
        "is the time outside these phases."
    )
    keys = ("arm", "steps", "seconds_per_step", *parts)
    return Table("phases", "Seconds of a step, by phase", keys, columns, tuple(rows), note)


def runs_table(analysis: Analysis) -> Table:
    """Every run with its state, also those that failed or are missing."""
    rows = tuple(
        {"arm": arm.name, "label": arm.label} | row
        for arm in analysis.arms
        for row in [*map(_missing_row, arm.missing), *(_run_row(run, analysis.metric) for run in arm.runs)]
    )
    tools = any("tool_calls" in row for row in rows)
    columns = [
        ARM,
        Column("run", "run", is_text=True),
        Column("state", "state", is_text=True),
        Column("reason", lambda row: row["reason"], is_text=True),
        Column("steps", "steps", 0),
        Column("trained for", lambda row: duration(row["seconds"])),
        Column("evaluations", "evaluations"),
        Column(f"last {words(analysis.metric)}", "last_score"),
    ]
    if tools:
        columns += [Column("tool calls of a rollout", "tool_calls", 2), Column("failed", "tool_failures")]
    keys = "arm run seed state reason steps seconds evaluations last_score device dtype"
    keys += " tool_calls tool_failures" * tools
    ended_well_last = tuple(sorted(rows, key=lambda row: row["state"] == "finished"))
    note = (
        f"{_states(analysis)}. “trained for” is the training clock, without evaluation. The state is the last that a "
        "run wrote: one that was killed without warning may say running."
    )
    if tools:
        note += " “failed” is the share of the tool calls, over all rollouts of the run."
    return Table("runs", "Runs", tuple(keys.split()), tuple(columns), rows, note, shown=ended_well_last)


def _run_row(run: Run, metric: str) -> Row:
    scores = [score for row in run.evals if (score := finite(row.get(metric))) is not None]
    return {
        "run": plain(run.path.name),
        "seed": run.seed,
        "state": plain(run.state),
        "reason": plain(run.status.get("reason") or "", limit=200),
        "steps": finite(run.status.get("step")),
        "seconds": finite(run.status.get("seconds")) or math.nan,
        "evaluations": len(scores),
        "last_score": scores[-1] if scores else math.nan,
        "device": plain(run.environment.get("device") or ""),
        "dtype": plain(run.environment.get("dtype") or ""),
        **_tool_cells(run),
    }


def _tool_cells(run: Run) -> Row:
    """Return calls of a rollout and the share that failed, means over the run; empty without tools."""

    def logged(name: str) -> list[float]:
        return [value for row in run.metrics if (value := finite(row.get(name))) is not None]

    frequencies, calls = logged("tools/call_frequency"), sum(logged("pods/tool_calls"))
    if not frequencies:
        return {}
    shares = logged("tools/failure_frequency")
    failed = sum(logged("pods/tool_failures")) / calls if calls else sum(shares) / max(len(shares), 1)
    return {"tool_calls": sum(frequencies) / len(frequencies), "tool_failures": failed}


def _missing_row(missing: Missing) -> Row:
    row: Row = {"run": f"seed-{missing.seed}", "seed": missing.seed, "state": "missing", "reason": missing.reason}
    return row | {"seconds": math.nan, "evaluations": 0}


def _states(analysis: Analysis) -> str:
    """``6 runs: 4 finished, 1 failed, 1 missing``."""
    states = Counter(plain(run.state) for run in analysis.runs)
    states += Counter({"missing": sum(len(arm.missing) for arm in analysis.arms)})
    parts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return f"{plural(states.total(), 'run')}: {parts}" if parts else "No runs"


def config_table(analysis: Analysis) -> Table:
    """The settings in which the arms differ: a row each, and for a reader of many arms a row for each arm."""
    arms = [arm for arm in analysis.arms if arm.config]
    settings = sorted({key for arm in arms for key in arm.config} - OWN_TO_A_RUN, key=str)
    values = {key: [_setting(arm.config, key) for arm in arms] for key in settings}
    differing = [(plain(key), row) for key, row in values.items() if len(set(row)) > 1]
    # our own column names: an arm may have any name, such as "setting"
    places = [f"arm_{index}" for index in range(len(arms))]
    rows = tuple({"setting": key, **dict(zip(places, row, strict=True))} for key, row in differing)
    shown, keys, header = rows, ("setting", *places), ("setting", *(arm.name for arm in arms))
    columns = [Column("setting", "setting", is_text=True)]
    columns += [Column(arm.label, place, is_text=True) for arm, place in zip(arms, places, strict=True)]
    if len(arms) > max(len(rows), 4):
        columns = [ARM, *(Column(row["setting"], f"{index}", is_text=True) for index, row in enumerate(rows))]
        shown = tuple(
            {"label": arm.label, **{f"{index}": row[place] for index, row in enumerate(rows)}}
            for arm, place in zip(arms, places, strict=True)
            if rows
        )
    note = "From the recipe of each arm’s first run. The config.yaml of any run has what all arms share."
    return Table("config", "What differs between the arms", keys, tuple(columns), rows, note, header, shown)


def _setting(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return "(not set)"
    value = config[key]
    return plain(value if isinstance(value, str) else in_order(value), limit=120)
