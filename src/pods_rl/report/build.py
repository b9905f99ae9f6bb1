"""From run directories, or a CSV of evaluations, to the files of a report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..errors import UserError
from ..runs import write_atomic
from ..text import safe_text
from .analysis import Analysis, analyse
from .arms import Arm, arms_from_runs, earlier_attempts
from .curves import finite
from .evaluations_csv import arms_from_csv
from .figures import FIGURES, pictures
from .interactive import charts
from .ledger import DATA_MB, Page, ledger_page
from .pages import ReportFiles, to_html, to_markdown
from .plots import KINDS
from .publication import printed
from .run_tables import config_table, phases_table, runs_table
from .tables import ablations_table, arms_table, curves_table, scores_table, speedup_table
from .text import plain
from .wording import headlines, method, notes

_TABLES = (
    arms_table,
    speedup_table,
    scores_table,
    ablations_table,
    curves_table,
    phases_table,
    runs_table,
    config_table,
)


# in the terminal, to fit 80 columns
_SHORT = {"final, 95 % interval": "final [95 %]", "speedup, 95 % interval": "speedup [95 %]", "final format": "format"}
_SKIPPED = {"peak", "s/step"}


def build_report(
    sources: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = "grpo",
    metric: str = "accuracy",
    resamples: int = 2000,
    seed: int = 0,
    figures: Sequence[str] = (),
    rollouts_mb: float = DATA_MB,
) -> ReportFiles:
    """Read runs and write ``report.html``, ``report.png``, ``report.md``, a CSV of every table and ``figures/``.

    Args:
        sources: an experiment directory, a run directory, or several of either.
        output: folder to write to; by default ``report`` inside the one source, or beside several.
        baseline: the arm that the others are measured against; None for no comparison.
        metric: the field of ``evals.jsonl`` to compare by.
        resamples: bootstrap resamples of the runs.
        seed: of the bootstrap; the same runs and seed give the same numbers.
        figures: formats (``pdf``, ``svg``, ``png``) of figures for a paper, written to ``publication/``.
        rollouts_mb: megabytes of rollouts that the page may hold, about; it says what it left out.

    Raises:
        UserError: if no run is found, if runs were evaluated but never on ``metric``, if none of
            several arms is called ``baseline``, if a format is unknown, and if the folder cannot be written.
    """
    _check_kinds(figures)
    paths = [Path(sources)] if isinstance(sources, (str, Path)) else [Path(source) for source in sources]
    arms = arms_from_runs(paths, metric)
    _check_metric(arms, metric)
    if output is None:
        common = paths[0] if len(paths) == 1 else Path(os.path.commonpath([p.resolve() for p in paths]))
        output = common / "report"
    attempts = earlier_attempts(paths)
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed, attempts=attempts)
    title = paths[0].resolve().name if len(paths) == 1 else f"{len(paths)} runs"
    ledger = ledger_page(analysis.arms, data_mb=rollouts_mb)
    return _write(analysis, ledger, Path(output), title, figures)


def build_report_from_csv(
    csv: str | Path,
    output: str | Path,
    baseline: str | None = "grpo",
    metric: str = "answer_accuracy",
    *,
    resamples: int = 2000,
    seed: int = 0,
    figures: Sequence[str] = (),
) -> ReportFiles:
    """The same report from a CSV of evaluations (columns: ``curves_from_csv``); without phases and ledger."""
    _check_kinds(figures)
    arms = arms_from_csv(csv, metric)
    if not any(arm.curve for arm in arms):
        raise UserError(f"{csv}: column {metric} holds no number. Choose another with --metric.")
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed)
    return _write(analysis, Page(), Path(output), Path(csv).name, figures)


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"--figures {plain(kind)}: no such format. Choose among {', '.join(KINDS)}.")


def _check_metric(arms: Sequence[Arm], metric: str) -> None:
    if any(arm.curve for arm in arms):
        return
    rows = [row for arm in arms for run in arm.runs for row in run.evals]
    known = sorted({key for row in rows for key, value in row.items() if finite(value) is not None})
    if known:
        raise UserError(
            f"No evaluation has a number called {metric!r}. Choose one of {', '.join(known)} with --metric."
        )


def _write(analysis: Analysis, ledger: Page, folder: Path, title: str, kinds: Sequence[str]) -> ReportFiles:
    report = ReportFiles(
        folder=folder,
        title=title,
        analysis=analysis,
        headlines=headlines(analysis),
        notes=notes(analysis),
        method=method(analysis),
        tables={table.name: table for table in (make(analysis) for make in _TABLES)},
        images=pictures(analysis),
        charts=charts(analysis),
        ledger=ledger,
    )
    try:
        folder.joinpath("figures").mkdir(parents=True, exist_ok=True)
        write_atomic(report.html, to_html(report))
        write_atomic(report.png, report.images["curves"].png)
        for name, path in report.figures.items():
            write_atomic(path, report.images[name].png)
        for name in {*FIGURES} - {*report.figures}:  # of an earlier report in this folder
            (folder / "figures" / f"{name}.png").unlink(missing_ok=True)
        for name, content in printed(analysis, kinds):
            (folder / "publication").mkdir(exist_ok=True)
            write_atomic(folder / "publication" / name, content)
        write_atomic(report.markdown, to_markdown(report))
        for name, table in report.tables.items():
            write_atomic(report.csv[name], table.to_csv())
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {folder}: {error.strerror}. Choose another folder with --output."
        ) from error
    return report


def print_summary(report: ReportFiles, console: Console) -> None:
    """The headlines, the table of arms in at most 80 columns, the notes and the paths of the files."""
    source = report.tables["final"]
    shown = [index for index, column in enumerate(source.columns) if column.title not in _SKIPPED]
    table = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for index in shown:
        column = source.columns[index]
        justify = "left" if column.is_text else "right"
        table.add_column(_SHORT.get(column.title, column.title), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for cells in source.cells():
        table.add_row(*(escape(plain(cells[index])) for index in shown))
    width = min(console.width, 80)
    for rank, headline in enumerate(report.headlines):
        style = "bold" if rank == 0 else None
        console.print(safe_text(headline), style=style, width=width, highlight=False, soft_wrap=False)
    console.print(table, width=width)
    for note in report.notes:
        console.print(f"[yellow]Note:[/yellow] {safe_text(note)}", width=width, highlight=False, soft_wrap=False)
    for path in (report.html, report.png, report.speedup):
        console.print(safe_text(path), soft_wrap=True, highlight=False)
