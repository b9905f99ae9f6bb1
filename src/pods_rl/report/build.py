"""From run directories, or a CSV of evaluations, to the files of a report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..runs import write_atomic
from .analysis import Analysis, analyse
from .arms import Arm, arms_from_csv, arms_from_runs
from .curves import finite
from .html import render
from .ledger import Page, ledger_page
from .missing_runs import earlier_attempts
from .pictures import FIGURES, Picture, pictures
from .resampling import FEW
from .run_tables import config_table, phases_table, runs_table
from .score_tables import ablations_table, curves_table, scores_table
from .tables import Table, arms_table, speedup_table
from .text import markdown


@dataclass(frozen=True, eq=False)
class ReportFiles:
    """Where the report lies, and what it says."""

    folder: Path
    html: Path
    png: Path
    markdown: Path
    figures: dict[str, Path]  # PNG by name: curves, threshold, phases, steps, format_accuracy, ablation-n, ...
    csv: dict[str, Path]  # by table: speedup, final, scores, ablations, curves, phases, runs, config
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
    """Read runs and write ``report.html``, ``report.png``, ``report.md``, a CSV of every table and ``figures/``.

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
    attempts = earlier_attempts(paths)
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed, attempts=attempts)
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
    makers = (
        arms_table,
        speedup_table,
        scores_table,
        ablations_table,
        curves_table,
        phases_table,
        runs_table,
        config_table,
    )
    tables = {table.name: table for table in (make(analysis) for make in makers)}
    method = method_lines(analysis)
    images = pictures(analysis)
    files = ReportFiles(
        folder=folder,
        html=folder / "report.html",
        png=folder / "report.png",
        markdown=folder / "report.md",
        figures={name: folder / "figures" / f"{name}.png" for name in images},
        csv={name: folder / f"{name}.csv" for name in tables},
        analysis=analysis,
        tables=tables,
    )
    try:
        files.folder.joinpath("figures").mkdir(parents=True, exist_ok=True)
        write_atomic(files.html, render(analysis, tables, images, page, title=title, method=method))
        _write_figures(files, images)
        write_atomic(files.markdown, to_markdown(analysis, tables, images, title, method))
        for name, table in tables.items():
            write_atomic(files.csv[name], table.to_csv())
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {folder}: {error.strerror}. Choose another folder with --output."
        ) from error
    return files


def _write_figures(files: ReportFiles, images: dict[str, Picture]) -> None:
    """The figures of this report; one that an earlier report of the folder had and this one has not goes."""
    write_atomic(files.png, images["curves"].png)
    for name, path in files.figures.items():
        write_atomic(path, images[name].png)
    for stale in {files.folder / "figures" / f"{name}.png" for name in FIGURES} - {*files.figures.values()}:
        stale.unlink(missing_ok=True)


def method_lines(analysis: Analysis) -> tuple[str, ...]:
    """How the numbers were made, in sentences."""
    lines = [
        "Time is the training clock: evaluation is not in it. A checkpoint’s time is the mean over runs of "
        "the real seconds at which it was made; checkpoints of runs are matched by their nominal second.",
        "Intervals of scores are 1.96 standard errors over runs, as in the paper (final.csv has the bootstrap’s too). "
        "A run that stands alone has the standard error of its evaluation over the prompts (evaluation_se in "
        "final.csv), which says nothing about other runs. Checkpoints that half of an arm’s runs or fewer have are in "
        "no mean. No run is left out: killed and failed runs count as far as they got.",
    ]
    if any(arm.curve and arm.curve.interpolated for arm in analysis.arms):
        lines.append(
            "Where the runs of an arm were evaluated at times of their own, scores are interpolated linearly between "
            "the evaluations of each run, at common times. On a shared clock nothing is interpolated."
        )
    if analysis.speedups:
        lines += [
            "Speedup is the authors’ rule: T is 0.99 times the maximum of the baseline’s mean curve; the "
            "time of the baseline’s first checkpoint at T over that of the arm’s. speedup.csv has the peak itself "
            "and linear crossings between checkpoints too.",
            f"Its interval is the 2.5 and 97.5 percentile of {analysis.resamples} bootstrap resamples (seed "
            f"{analysis.seed}): runs of baseline and arm are drawn independently, T is computed anew in "
            "each, and a resample that never reaches T, be it that most of its runs died, counts as speedup 0. The "
            "interval of the other resamples is the authors’ own (reached_low and reached_high in final.csv).",
            "A difference counts as settled when this interval does not include 1, and neither does one that allows "
            f"for few runs (below {FEW} runs deviations are widened as by Student’s t) and for the evaluation’s "
            "standard error, where runs differ less than that says. A single run settles nothing.",
        ]
    return tuple(lines)


def to_markdown(
    analysis: Analysis, tables: dict[str, Table], images: dict[str, Picture], title: str, method: tuple[str, ...]
) -> str:
    """The headline, the notes, every table that has rows and every figure, each with its note."""
    first, *further = analysis.headlines or (f"No evaluation of {analysis.metric} yet.",)
    parts = [f"# PODS report: {markdown(title)}", f"**{markdown(first)}**", *_bullets(further)]
    parts += ["![main figure](figures/curves.png)", markdown(images["curves"].note), *_bullets(analysis.notes)]
    for table in tables.values():
        if table.cells():
            parts += [f"## {markdown(table.title)}", table.to_markdown()]
            parts += [markdown(table.note)] if table.note else []
    parts += ["## Figures"]
    for name, image in images.items():
        if name != "curves":
            parts += [f"![{markdown(image.alt)}](figures/{name}.png)", markdown(image.note)]
    parts += ["## How these numbers were computed", *_bullets(method)]
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {markdown(line)}" for line in lines)] if lines else []
