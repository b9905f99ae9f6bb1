"""The report of the map of regimes: figures, tables and CSV files of whatever runs are finished."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pods_rl.report.arms import Curve
from pods_rl.report.charts import Style, line_styles
from pods_rl.report.figures import add_legend, look, new_figure, styled, to_bytes
from pods_rl.report.intervals import Array
from pods_rl.report.statistics import mean_curve, time_to
from pods_rl.runs import write_atomic
from regime_runs import (
    ARMS,
    FIRST_SELECTION_SEED,
    LADDER,
    PHASES,
    RANGE_RATES,
    RESULTS,
    RULES,
    SEEDS,
    TRL,
    VARIANTS,
    Arm,
    Choice,
    Key,
    Store,
    choose,
    over_time,
    read_rows,
    wanted_runs,
    write_rows,
)
from regime_statistics import (
    BEST,
    FEW,
    HALFWAY,
    HIGH,
    SAME_M,
    WITHIN,
    Cell,
    Measure,
    Range,
    RateCurve,
    compare_cells,
    interval,
    normal_band,
    paired,
    rate_curves,
    resamples,
)
from study import keep_picture

LADDER_COLUMNS = (
    "row", "rate", "target", "seconds", "low", "high", "seeds", "seconds_a_step", "cpu", "commit", "command"
)  # fmt: skip
RULE_COLUMNS = (
    "cell", "rule", "rate", "seeds", "measure", "max_variance", "other", "value", "low", "high", "won", "verdict"
)  # fmt: skip
LINES = ("16x4-n8", "1x16-n64")  # of the figure over the cost of a step
PUBLISHED = 10.12 / 7.56  # seconds a step at n = 64 and 16, m = 16, in the authors' published GSM8K runs
COLOURS = {
    "ahead": "#9ecae1",
    "level": "#e6e8ea",
    "behind": "#fdae6b",
    "few seeds": "#ffffff",
    "not reached": "#ffffff",
    "missing": "#ffffff",
}


def group_of(arm: Arm) -> str:
    return f"{arm.prompts} prompt{'s' if arm.prompts > 1 else ''} of {arm.m}"


@styled
def map_figure(cells: dict[str, Cell]) -> Figure:
    """Where PODS is ahead of its rival, level or behind: a panel for each measure, a tile for each cell."""
    panels = (f"time to {HALFWAY:g}", f"time to {HIGH:g}", "accuracy over time", "final accuracy")
    pods = [arm for arm in ARMS.values() if not arm.is_grpo]
    groups = [*dict.fromkeys(map(group_of, pods))]
    figure = new_figure(8.4, 3.6)
    for axes, name in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, panels, strict=True):
        for arm in pods:
            x = 0 if arm.n == 2 * arm.m else 1
            y = groups.index(group_of(arm))
            cell = cells.get(arm.name)
            verdict = cell.measures[name].verdict(len(cell.seeds)) if cell else "missing"
            tile = {"facecolor": COLOURS[verdict], "edgecolor": "#bdc1c6", "linewidth": 0.5}
            axes.add_patch(Rectangle((x - 0.49, y - 0.47), 0.98, 0.94, **tile))
            text = f"{cell.measures[name].text}\n{verdict}, {len(cell.seeds)} seeds" if cell else "missing"
            axes.text(x, y, text, ha="center", va="center", fontsize=6)
        axes.set_title(f"{name}: {'GRPO / PODS' if 'time to' in name else 'PODS - GRPO'}", fontsize=8)
        axes.set_xlim(-0.5, 1.5)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xticks([0, 1], ["n = 2m", "n = 4m"])
        axes.set_yticks(range(len(groups)), groups)
        axes.grid(visible=False)
    return figure


@styled
def range_figure(curves: Sequence[RateCurve]) -> Figure:
    """Accuracy over the last third against the learning rate: means, every run, and a bar for each range."""
    figure = new_figure(5.2, 3.0)
    axes = figure.add_subplot()
    entries = []
    for rank, (curve, style) in enumerate(zip(curves, line_styles(len(curves)), strict=True)):
        (line,) = axes.plot(curve.rates, curve.scores.mean(axis=1), **look(style))
        for scores in curve.scores.T:
            axes.plot(curve.rates, scores, "o", color=style.colour, alpha=0.45, markersize=3, mew=0)
        height = 0.02 + 0.025 * rank
        axes.plot([curve.mean.low, curve.mean.high], [height, height], color=style.colour, linewidth=3)
        entries.append((line, curve.arm.label.partition(",")[0]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANGE_RATES, [f"{rate:g}" for rate in RANGE_RATES])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"learning rate, 64 rows a step (bars: within {WITHIN:g} of the best)")
    axes.set_ylabel("accuracy, last third of the run")
    add_legend(figure, entries)
    return figure


class Line(NamedTuple):
    """PODS against GRPO with the same m: in how many times fewer steps it is at an accuracy, and what a step costs."""

    label: str
    target: float
    steps: tuple[float, float, float]  # with its interval
    cost: float  # of a PODS step, in steps of GRPO
    times: float  # as soon, as measured


class Mark(NamedTuple):
    """What a step of PODS costs in steps of GRPO with the same levers, and where this was measured."""

    ratio: float
    source: str


def lines_of(cells: dict[str, Cell]) -> list[Line]:
    """Return what was measured here: word problems, and the chat model of `study.py chat` once it is finished."""
    lines = []
    for name in LINES:
        cell = cells.get(name)
        target = target_of(cell) if cell else None
        if cell and target:
            steps = cell.measures[f"steps to {target:g}"]
            times = cell.measures[f"time to {target:g}"]
            cost = cell.measures["seconds a step"].value
            lines.append(Line(cell.arm.label, target, (steps.value, steps.low, steps.high), cost, times.value))
    crossings: dict[tuple[str, str], tuple[float, float, float]] = {}
    for row in read_rows(RESULTS / "chat" / "crossings.csv"):
        if row["claim"] == "PODS against GRPO":
            crossings[row["of"], row["accuracy"]] = (float(row["ratio"]), float(row["low"]), float(row["high"]))
    for target in (HIGH, HALFWAY):
        value, low, high = crossings.get(("step", f"{target:g}"), (0.0, 0.0, 0.0))
        if 0 < low <= high < math.inf:
            cost = 1 / crossings["seconds a step", ""][0]
            seconds = crossings["seconds", f"{target:g}"][0]
            lines.append(Line("SmolLM2-135M 32 -> 8, 4 prompts a step", target, (value, low, high), cost, seconds))
            break
    return lines


def marks(cells: dict[str, Cell]) -> list[Mark]:
    """Return the ratios of step costs measured here, and the one that is published."""
    measured = [Mark(line.cost, f"{line.label}, here") for line in lines_of(cells)]
    return [*measured, Mark(PUBLISHED, "Qwen2.5-3B, GSM8K, 64 -> 16, one L40S, published")]


def target_of(cell: Cell) -> float | None:
    """Return the highest of the two accuracies whose ratio of steps has a finite interval, None if neither has."""
    for target in (HIGH, HALFWAY):
        steps = cell.measures[f"steps to {target:g}"]
        if 0 < steps.low <= steps.high < math.inf:
            return target
    return None


def draw_cost(axes: Axes, cells: dict[str, Cell]) -> None:
    """Speedup against what a PODS step costs in steps of GRPO: the ratio of steps over that cost, with its band."""
    costs = np.linspace(0.8, 2.4, 161)
    drawn = lines_of(cells)
    for line, style in zip(drawn, line_styles(len(drawn)), strict=True):
        value, low, high = line.steps
        axes.plot(costs, value / costs, label=f"{line.label}, to {line.target:g}", **look(style))
        axes.fill_between(costs, low / costs, high / costs, color=style.colour, alpha=0.12, linewidth=0)
        axes.plot([line.cost], [line.times], "o", color=style.colour, ms=5, mec="white")
    axes.axhline(1.0, color="#3c4043", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(2.4, 1.02, "break-even", ha="right", va="bottom", fontsize=6)
    top = max(2.0, *(line.steps[0] * 1.1 for line in drawn), 2.0)
    for height, mark in enumerate(sorted(marks(cells))):
        axes.axvline(mark.ratio, color="#8a9099", linewidth=0.7, linestyle=(0, (1, 2)))
        axes.text(mark.ratio + 0.015, (0.03 + 0.05 * height) * top, f"{mark.ratio:.2f}: {mark.source}", fontsize=5.5)
    axes.set_xlim(0.8, 2.4)
    axes.set_ylim(0, top)
    axes.set_xlabel("cost of a PODS step, in steps of GRPO\n(steps measured here, seconds there)")
    axes.set_ylabel("times as soon as GRPO with the same m")
    if drawn:
        axes.legend(loc="upper right", fontsize=6)


@styled
def headline_figure(store: Store, cells: dict[str, Cell]) -> Figure:
    """Accuracy over time of the ladder's rows: means and 95 % bands; beside it the speedup over a step's cost."""
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    draw_cost(right, cells)
    pods_style, grpo_style = line_styles(2)
    for (name, rate), style in zip(LADDER.items(), (Style("#8a9099"), grpo_style, pods_style), strict=False):
        seeds = store.seeds(name, rate) & {*SEEDS["ladder"]}
        if not seeds:
            continue
        arm = (ARMS | VARIANTS)[name]
        curve = store.curve(name, rate, seeds)
        low, high = normal_band(curve.scores)
        rollouts = f"{arm.prompts} x {arm.n} rollouts"
        if arm.n > arm.m:
            label = f"PODS: {rollouts}, {arm.m} of {arm.n} trained"
        elif arm.what == TRL:
            label = f"TRL's GRPO: {rollouts}"
        else:
            label = f"GRPO with the same cheaper steps: {rollouts}"
        left.plot(curve.times, curve.mean, label=label, **look(style))
        left.fill_between(curve.times, low, high, color=style.colour, alpha=0.15, linewidth=0)
        left.legend(loc="lower right", fontsize=6.5)
    left.set_xlabel("seconds of one CPU core")
    left.set_ylabel("accuracy on held-out problems")
    left.set_xlim(0, store.max_seconds)
    left.set_ylim(0, 1)
    return figure


def write_ladder(store: Store) -> str:
    """Write `ladder.csv`: seconds until the mean accuracy over seeds is 0.5, and 0.8; return it as Markdown."""
    rows = []
    lines = []
    for name, rate in LADDER.items():
        seeds = {seed for seed in store.seeds(name, rate) if seed in SEEDS["ladder"]}
        if not seeds:
            continue
        runs = [store.runs[Key(name, rate, seed)] for seed in sorted(seeds)]
        cpus, commits = (", ".join(sorted({run[key] for run in runs})) for key in ("cpu", "commit"))
        command = f"python benchmarks/regimes.py ladder --cells {name}"
        step = f"{store.column(name, rate, seeds, 'seconds_per_step').mean():.3f}"
        shown = []
        for target in (HALFWAY, HIGH):
            times = _seconds_to(store.curve(name, rate, seeds), target)
            words = ["never" if math.isinf(value) else f"{value:.1f}" for value in times]
            values = (name, f"{rate:g}", f"{target:g}", *words, str(len(seeds)), step, cpus, commits, command)
            rows.append(dict(zip(LADDER_COLUMNS, values, strict=True)))
            shown.append(f"{words[0]} ({words[1]} to {words[2]})")
        lines.append(((ARMS | VARIANTS)[name].label, *shown, step, str(len(seeds)), f"`{command}`", commits))
    write_rows(store.folder / "ladder.csv", LADDER_COLUMNS, rows)
    targets = (f"seconds to {target:g}" for target in (HALFWAY, HIGH))
    return _table(("row", *targets, "seconds a step", "seeds", "command", "commit"), lines)


def _seconds_to(curve: Curve, target: float) -> tuple[float, float, float]:
    """Return when the mean over seeds reaches an accuracy, with its interval."""

    def seconds(drawn: Array | None) -> Array:
        means = (mean_curve(values, drawn) for values in (curve.scores, curve.seconds))
        return time_to(*means, target, interpolated=True)

    return float(seconds(None)), *interval(seconds(resamples(len(curve.scores))))


def compare_rules(store: Store, choices: dict[str, Choice | None]) -> list[dict[str, str]]:
    """Return max-variance against each other rule at equal n, m and rate, paired by seed."""
    rows = []
    for name in RULES:
        base = VARIANTS[name].base
        choice = choices[base]
        if choice is None:
            continue
        shared = store.seeds(base, choice.rate) & store.seeds(name, choice.rate) & {*SEEDS["rules"]}
        if not shared:
            continue
        max_variance = store.curve(base, choice.rate, shared)
        rule = store.curve(name, choice.rate, shared)
        for measure in (
            paired("accuracy over time", over_time(max_variance), over_time(rule)),
            paired("final accuracy", max_variance.scores[:, -1], rule.scores[:, -1]),
        ):
            numbers = (measure.first, measure.second, measure.value, measure.low, measure.high)
            words = [f"{number:.4g}" for number in numbers]
            verdict = measure.verdict(len(shared))
            about = (base, VARIANTS[name].what, f"{choice.rate:g}", str(len(shared)), measure.name)
            values = (*about, *words, measure.won)
            rows.append(dict(zip(RULE_COLUMNS, (*values, verdict), strict=True)))
    return rows


def report(store: Store, options: argparse.Namespace) -> str:
    """Write tables and figures of what is finished; return the report as Markdown."""
    folder = store.folder
    folder.mkdir(parents=True, exist_ok=True)
    choices = {name: choose(store, name, options.rates) for name in ARMS}
    compared = compare_cells(store, choices)
    curves = rate_curves(store)
    cells = {cell.arm.name: cell for cell in compared if cell.kind == BEST}
    same = {cell.arm.name: cell for cell in compared if cell.kind == SAME_M}
    rules = compare_rules(store, choices)
    pairs = sorted({(key.arm, key.rate) for key in store.runs if key.seed < FIRST_SELECTION_SEED})
    parts = [
        "# The map of regimes",
        f"Written by `python benchmarks/regimes.py report`. Word problems, tiny-words, one thread, "
        f"{store.max_seconds:g} s of processor time a run. Intervals are 95 %.",
        _provenance(store),
        "## Missing",
        *(f"- {line}" for line in _missing(store, options)),
        "## Learning rates, chosen by accuracy over time on the seeds of `select`",
        *(_choice_line(store, name, choice, options.rates) for name, choice in choices.items()),
        *(line for kind in (BEST, SAME_M, TRL) for line in _cell_tables(kind, compared)),
        "## Max-variance against the paper's other rules, at equal n, m and learning rate",
        _table(RULE_COLUMNS, [[row[name] for name in RULE_COLUMNS] for row in rules]) if rules else "Missing.",
        "## The ladder",
        write_ladder(store),
        "## Seconds of a step by phase",
        _table(("arm", "rate", "seeds", "step", *PHASES), _cost_rows(store, pairs)),
        f"## Learning rates within {WITHIN:g} of the best, by accuracy over the last third",
        *(_range_line(curve) for curve in curves),
    ]
    columns = ("against", "cell", "rate", "rival", "rival_rate", "seeds", "measure", "first", "second", "value", "low")
    write_rows(folder / "cells.csv", (*columns, "high", "won", "verdict"), _cell_rows(compared))
    rows = [dict(zip(("arm", "rate", "seeds", "step", *PHASES), row, strict=True)) for row in _cost_rows(store, pairs)]
    write_rows(folder / "costs.csv", ("arm", "rate", "seeds", "step", *PHASES), rows)
    ranges = [
        {"arm": c.arm.name, "seeds": len(c.seeds), **{k: f"{v:.4g}" for k, v in c.mean._asdict().items()}}
        for c in curves
    ]
    write_rows(folder / "range.csv", ("arm", "seeds", *Range._fields), ranges)
    write_rows(
        folder / "marks.csv", Mark._fields, [mark._asdict() | {"ratio": f"{mark.ratio:.4g}"} for mark in marks(same)]
    )
    scores = []
    for curve in curves:
        for rate, row in zip(curve.rates, curve.scores, strict=True):
            about = {"arm": curve.arm.name, "rate": f"{rate:g}", "seeds": len(curve.seeds)}
            scores.append(about | {"last_third": f"{row.mean():.4g}"})
    write_rows(folder / "rates.csv", ("arm", "rate", "seeds", "last_third"), scores)
    write_rows(folder / "rules.csv", RULE_COLUMNS, rules)
    figures = {"headline": headline_figure(store, same), "map": map_figure(cells), "range": range_figure(curves)}
    for name, figure in figures.items():
        raw = options.runs / f"{name}.png"
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.write_bytes(to_bytes(figure, "png"))
        keep_picture(raw, folder / f"{name}.png")
        parts.append(f"![{name}]({name}.png)")
    text = "\n\n".join(filter(None, parts)).replace("\n\n- ", "\n- ") + "\n"
    write_atomic(folder / "report.md", text)
    return text


def _provenance(store: Store) -> str:
    """Say which commits and processors the runs are from."""
    commits = sorted({row["commit"] for row in store.runs.values()})
    cpus = sorted({row["cpu"] for row in store.runs.values()})
    mixed = " Seconds of different processors are not comparable." if len(cpus) > 1 else ""
    return f"{len(store.runs)} runs; commits {', '.join(commits)}; processors {', '.join(cpus)}.{mixed}"


def _missing(store: Store, options: argparse.Namespace) -> list[str]:
    lines = []
    for part in SEEDS:
        wanted = wanted_runs(part, store, options)
        lacking = [key for key in wanted if key not in store.runs]
        arms = ", ".join(dict.fromkeys(key.arm for key in lacking))
        minutes = len(lacking) * store.seconds_a_run / 60
        where = f": about {minutes:.0f} minutes of one core, for {arms}" if lacking else ""
        lines.append(f"{part}: {len(lacking)} of {len(wanted)} runs{where}")
    unselected = [name for name in ARMS if choose(store, name, options.rates) is None]
    if unselected:
        lines.append(f"compare also waits for select of {', '.join(unselected)}")
    return lines


def _choice_line(store: Store, name: str, choice: Choice | None, rates: Sequence[float]) -> str:
    if choice is None:
        return f"- {name}: missing"
    notes = []
    if len(rates) > 1 and choice.rate in (min(rates), max(rates)):
        outside = sorted({key.rate for key in store.runs if key.arm == name} - {*rates})
        notes_on_end = ["the end of the grid"]
        for rate in outside:
            chosen = choose(store, name, [rate])
            if chosen:
                notes_on_end.append(f"{rate:g} has {chosen.score:.3f}")
        notes.append("; ".join(notes_on_end))
    if choice.by_last_third != choice.rate:
        notes.append(f"by the last third it would be {choice.by_last_third:g}")
    remarks = f" ({', '.join(notes)})" if notes else ""
    return f"- {name}: {choice.rate:g}, accuracy over time {choice.score:.3f}{remarks}"


def _cell_tables(kind: str, compared: Sequence[Cell]) -> list[str]:
    return [f"## Against {kind}", *(_cell_table(cell) for cell in compared if cell.kind == kind)]


def _cell_table(cell: Cell) -> str:
    seeds = len(cell.seeds)
    few = f" Fewer than {FEW} seeds settle nothing." if seeds < FEW else ""
    head = (
        f"### {cell.arm.label} ({cell.rates[0]:g}) against {cell.rival.label} ({cell.rates[1]:g})\n\n"
        f"{seeds} seeds.{few} Times and steps: above 1 if the first is sooner.\n\n"
    )
    rows = [
        (m.name, _number(m.first), _number(m.second), m.text, m.won, m.verdict(seeds) if _judged(m) else "")
        for m in cell.measures.values()
    ]
    return head + _table(("measure", "first", "second", "95 % interval", "seeds won", "first is"), rows)


def _judged(measure: Measure) -> bool:
    """Whether more is better: spread and the cost of a step get no verdict."""
    return measure.name.startswith(("time to", "steps to")) or "accuracy" in measure.name


def _number(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.3g}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell_rows(compared: Sequence[Cell]) -> list[dict[str, str]]:
    rows = []
    for cell in compared:
        pair = {
            "against": cell.kind,
            "cell": cell.arm.name,
            "rate": f"{cell.rates[0]:g}",
            "rival": cell.rival.name,
            "rival_rate": f"{cell.rates[1]:g}",
        }
        for m in cell.measures.values():
            numbers = {key: f"{getattr(m, key):.4g}" for key in ("first", "second", "value", "low", "high")}
            verdict = m.verdict(len(cell.seeds)) if _judged(m) else ""
            rows.append(
                {**pair, "seeds": str(len(cell.seeds)), "measure": m.name, **numbers, "won": m.won, "verdict": verdict}
            )
    return rows


def _cost_rows(store: Store, pairs: Iterable[tuple[str, float]]) -> list[list[str]]:
    rows = []
    for arm, rate in pairs:
        seeds = {seed for seed in store.seeds(arm, rate) if seed < FIRST_SELECTION_SEED}
        means = [store.column(arm, rate, seeds, name).mean() for name in ("seconds_per_step", *PHASES)]
        rows.append([arm, f"{rate:g}", str(len(seeds)), *(f"{mean:.4f}" for mean in means)])
    return rows


def _range_line(curve: RateCurve) -> str:
    by_seed = ", ".join(f"seed {seed} {span.text}" for seed, span in zip(curve.seeds, curve.by_seed, strict=True))
    tried = f"{len(curve.rates)} of {len(RANGE_RATES)} rates"
    return f"- {curve.arm.label} ({tried}): {curve.mean.text}; best at {curve.mean.best:g}. By seed: {by_seed}."
