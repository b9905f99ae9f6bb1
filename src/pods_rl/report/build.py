"""From run directories, or a CSV of evaluations, to the files of a report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..runs import write_atomic
from .analysis import PHASES, Analysis, analyse
from .arms import Arm, arms_from_csv, arms_from_runs, finite
from .figures import (
    Bar,
    Line,
    Series,
    curves_figure,
    phases_figure,
    steps_figure,
    threshold_figure,
    to_bytes,
)
from .html import Image, render
from .ledger import Page, ledger_page
from .tables import Table, arms_table, config_table, phases_table, runs_table, speedup_table
from .text import duration, interval, markdown, number, unit_for
from .wording import words

STEP_METRICS = {
    "reward": "reward, all n rollouts",
    "pods/selected/reward_mean": "reward, kept rollouts",
    "pods/selected/reward_std": "spread of reward within the kept",
    "pods/zero_variance_share": "share of groups with equal rewards",
}


@dataclass(frozen=True, eq=False)
class ReportFiles:
    """Where the report lies, and what it says."""

    folder: Path
    html: Path
    png: Path
    markdown: Path
    csv: dict[str, Path]  # by table: speedup, final, phases, runs, config
    analysis: Analysis
    tables: dict[str, Table]

    @property
    def speedup(self) -> Path:
        return self.csv["speedup"]


def build_report(
    sources: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = "grpo",
    metric: str = "accuracy",
    resamples: int = 2000,
    seed: int = 0,
) -> ReportFiles:
    """Read runs and write ``report.html``, ``report.png``, ``report.md`` and a CSV of every table.

    Args:
        sources: an experiment directory, a run directory, or several of either.
        output: folder to write to; by default ``report`` inside the one source, or beside several.
        baseline: the arm that the others are measured against; None for no comparison.
        metric: the field of ``evals.jsonl`` to compare by.
        resamples: bootstrap resamples of the runs.
        seed: of the bootstrap; the same runs and seed give the same numbers.

    Raises:
        UserError: where no run is found, where runs were evaluated but never on ``metric``, where none of
            several arms is called ``baseline``, and where the folder cannot be written.
    """
    paths = [Path(sources)] if isinstance(sources, (str, Path)) else [Path(source) for source in sources]
    arms = arms_from_runs(paths, metric)
    _check_metric(arms, metric)
    if output is None:
        common = paths[0] if len(paths) == 1 else Path(os.path.commonpath([p.resolve() for p in paths]))
        output = common / "report"
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed)
    title = paths[0].resolve().name if len(paths) == 1 else f"{len(paths)} runs"
    return _write(analysis, ledger_page(analysis.arms), Path(output), title)


def build_report_from_csv(
    csv: str | Path,
    output: str | Path,
    baseline: str | None = "grpo",
    metric: str = "answer_accuracy",
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> ReportFiles:
    """The same report from a CSV of evaluations (columns: ``curves_from_csv``); without phases and ledger."""
    arms = arms_from_csv(csv, metric)
    if not any(arm.curve for arm in arms):
        raise UserError(f"{csv}: column {metric} holds no number. Choose another with --metric.")
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed)
    return _write(analysis, Page((), 0, ()), Path(output), Path(csv).name)


def _check_metric(arms: Sequence[Arm], metric: str) -> None:
    if any(arm.curve for arm in arms):
        return
    rows = [row for arm in arms for run in arm.runs for row in run.evals]
    known = sorted({key for row in rows for key, value in row.items() if finite(value) is not None})
    if known:
        raise UserError(
            f"No evaluation has a number called {metric!r}. Choose one of {', '.join(known)} with --metric."
        )


def _write(analysis: Analysis, page: Page, folder: Path, title: str) -> ReportFiles:
    makers = (arms_table, speedup_table, phases_table, runs_table, config_table)
    tables = {table.name: table for table in (make(analysis) for make in makers)}
    curves = _curves(analysis)
    images = {"curves": Image(to_bytes(curves, "svg"), f"{words(analysis.metric)} against training time")}
    images |= _further_images(analysis)
    method = method_lines(analysis)
    files = ReportFiles(
        folder=folder,
        html=folder / "report.html",
        png=folder / "report.png",
        markdown=folder / "report.md",
        csv={name: folder / f"{name}.csv" for name in tables},
        analysis=analysis,
        tables=tables,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(files.html, render(analysis, tables, images, page, title=title, method=method))
        files.png.write_bytes(to_bytes(curves, "png"))
        write_atomic(files.markdown, to_markdown(analysis, tables, title, method))
        for name, table in tables.items():
            write_atomic(files.csv[name], table.to_csv())
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {folder}: {error.strerror}. Choose another folder with --output."
        ) from error
    return files


def _curves(analysis: Analysis) -> Figure:
    lines = []
    for arm in analysis.arms:
        result = analysis.speedup_of(arm.name)
        if arm.curve:
            crossing = result.arm_time if result else np.inf
            is_baseline = arm is analysis.baseline
            lines.append(Line(arm.label, arm.curve.seconds, arm.curve.scores, is_baseline, crossing))
    base = analysis.baseline
    result = analysis.speedup_of(base.name) if base else None
    if base is None or result is None:
        return curves_figure(lines, metric=words(analysis.metric))
    label = f"99 % of {base.label}’s peak: {number(result.threshold)}"
    return curves_figure(
        lines, metric=words(analysis.metric), threshold=result.threshold, threshold_label=label
    )


def _further_images(analysis: Analysis) -> dict[str, Image]:
    images = {}
    bars = []
    unit = unit_for(analysis.horizon)
    for arm in analysis.arms:
        result = analysis.speedup_of(arm.name)
        if result:
            spread = interval(result.ci_low, result.ci_high)
            text = duration(result.arm_time, unit) if np.isfinite(result.arm_time) else "never reached"
            if arm is not analysis.baseline and result.speedup > 0:
                text += f"  {number(result.speedup, 2)}x" + ("" if spread == "–" else f" {spread}")
            bars.append(Bar(arm.label, result.arm_time, text, arm is analysis.baseline))
    if len(bars) > 1 and analysis.baseline:
        title = f"training time to 99 % of {analysis.baseline.label}’s peak"
        images["threshold"] = Image(to_bytes(threshold_figure(bars, title=title), "svg"), title)
    costs = {arm.label: analysis.costs[arm.name] for arm in analysis.arms if arm.name in analysis.costs}
    costs = {label: cost for label, cost in costs.items() if np.isfinite(cost.seconds_per_step)}
    if costs:
        seconds_AK = np.array([[*cost.phases.values(), cost.other] for cost in costs.values()])
        figure = phases_figure(list(costs), [*PHASES, "other"], seconds_AK)
        images["phases"] = Image(to_bytes(figure, "svg"), "seconds of a step by phase, for each arm")
    series = [_series(arm, is_baseline=arm is analysis.baseline) for arm in analysis.arms]
    if any(arm.values for arm in series):
        alt = "reward, kept reward, its spread and the share of groups with equal rewards, over the steps"
        images["steps"] = Image(to_bytes(steps_figure(series, STEP_METRICS), "svg"), alt)
    return images


def _series(arm: Arm, *, is_baseline: bool) -> Series:
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for metric in STEP_METRICS:
        for run in arm.runs:
            points = [(finite(row.get("step")), finite(row.get(metric))) for row in run.metrics]
            known = np.array([point for point in points if None not in point], dtype=np.float64)
            if len(known):
                found.setdefault(metric, []).append((known[:, 0], known[:, 1]))
    return Series(arm.label, found, is_baseline)


def method_lines(analysis: Analysis) -> tuple[str, ...]:
    """How the numbers were made, in sentences."""
    lines = [
        "Time is the training clock: evaluation is not in it. A checkpoint’s time is the mean over runs of the "
        "real seconds at which it was made; checkpoints of several runs are matched by their nominal second.",
        "Thick lines are means over runs; bands and the interval of the final score are 1.96 standard errors "
        "over runs, as in the paper (final.csv has bootstrap intervals too). Checkpoints that fewer than half "
        "of an arm’s runs have are in no mean. No run is left out: killed and failed runs count as far as they "
        "got.",
    ]
    if analysis.speedups:
        lines += [
            "Speedup is the authors’ rule: T is 0.99 times the maximum of the baseline’s mean curve; the time of "
            "the baseline’s first checkpoint at T over that of the arm’s. speedup.csv has the peak itself (1.00) "
            "and linear crossings between checkpoints too.",
            f"Its interval is the 2.5 and 97.5 percentile of {analysis.resamples} bootstrap resamples (seed "
            f"{analysis.seed}): runs of baseline and arm are drawn independently, T is computed anew in each, "
            "and a resample that never reaches T counts as speedup 0.",
        ]
    return tuple(lines)


def to_markdown(analysis: Analysis, tables: dict[str, Table], title: str, method: tuple[str, ...]) -> str:
    """The headline, the notes and every table that has rows."""
    parts = [
        f"# PODS report: {markdown(title)}",
        *(f"**{markdown(analysis.headlines[0])}**",)[: len(analysis.headlines)],
    ]
    parts += ["![main figure](report.png)"]
    parts += ["\n".join(f"- {markdown(note)}" for note in analysis.notes)] if analysis.notes else []
    for table in tables.values():
        if table.rows:
            parts += [
                f"## {markdown(table.title)}",
                table.to_markdown(),
                *([markdown(table.note)] if table.note else []),
            ]
    parts += ["## How these numbers were computed", "\n".join(f"- {line}" for line in method)]
    return "\n\n".join(parts) + "\n"
