"""Make the files of a report from run directories or a CSV of evaluations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..errors import UserError
from ..runs import write_atomic
from ..text import safe_text
from .analysis import Analysis, analyse
from .arms import Arm, arms_from_csv, arms_from_runs, real
from .charts import charts
from .curves import finite
from .ledger import DATA_MB, Ledger, ledger_of
from .pages import ReportFiles, to_html, to_markdown
from .tables import tables
from .text import plain
from .wording import headlines, method, notes

_KINDS = ("pdf", "svg", "png")
_MOST_MB = 2000.0  # a browser holds no larger page
# in the terminal, to fit 80 columns
_SHORT = {"final, 95 % interval": "final [95 %]", "speedup, 95 % interval": "speedup [95 %]"}
_SHOWN = ("arm", "final", "final, 95 % interval", "to\u00a099\u00a0%", "speedup", "speedup, 95 % interval",
          "runs")  # fmt: skip


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
    """Read runs and write ``report.html``, ``report.md`` and a CSV of every table.

    Args:
        sources: an experiment directory, a run directory, or several of either.
        output: folder to write to; by default ``report`` inside the one source, or next to several.
        baseline: the arm that the others are compared with. If None, arms are not compared.
        metric: the field of ``evals.jsonl`` to compare by.
        resamples: bootstrap resamples of the runs.
        seed: of the bootstrap; the same runs and seed give the same numbers.
        figures: formats (``pdf``, ``svg``, ``png``) of figures for a paper, written to ``figures/``.
        rollouts_mb: approximate megabytes of rollouts on the page. It says how many groups did not fit.

    Raises:
        UserError: if no run is found, if runs were evaluated but never on ``metric``, if none of
            several arms is called ``baseline``, if a format is unknown, and if the folder cannot be written.
    """
    _check_kinds(figures)
    paths = [Path(sources)] if isinstance(sources, (str, Path)) else [Path(source) for source in sources]
    report = read_report(
        paths, baseline=baseline, metric=metric, resamples=resamples, seed=seed, rollouts_mb=rollouts_mb
    )
    if output is None:
        output = (paths[0] if len(paths) == 1 else Path(os.path.commonpath([*map(real, paths)]))) / "report"
    return _write(report, Path(output), figures)


def read_report(
    paths: Sequence[Path],
    *,
    baseline: str | None = "grpo",
    metric: str = "accuracy",
    resamples: int = 2000,
    seed: int = 0,
    rollouts_mb: float = DATA_MB,
) -> ReportFiles:
    """Return the report of runs without writing it; arguments as of ``build_report``."""
    if not 0 <= rollouts_mb <= _MOST_MB:
        raise UserError(f"--rollouts_mb must be between 0 and {_MOST_MB:g}: got {rollouts_mb}.")
    arms = arms_from_runs(paths, metric)
    _check_metric(arms, metric)
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed)
    title = real(paths[0]).name if len(paths) == 1 else f"{len(paths)} runs"
    return _report(analysis, ledger_of(analysis.arms, data_mb=rollouts_mb), title)


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
    """Write the same report from a CSV of evaluations (columns: ``arms_from_csv``); without phases and rollouts."""
    _check_kinds(figures)
    arms = arms_from_csv(csv, metric)
    if not any(arm.curve for arm in arms):
        raise UserError(f"{csv}: column {metric} holds no number. Choose another with --metric.")
    analysis = analyse(arms, baseline=baseline, metric=metric, resamples=resamples, seed=seed)
    return _write(_report(analysis, Ledger(), Path(csv).name), Path(output), figures)


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in _KINDS:
            raise UserError(f"--figures {plain(kind)}: no such format. Choose among {', '.join(_KINDS)}.")


def _check_metric(arms: Sequence[Arm], metric: str) -> None:
    if any(arm.curve for arm in arms):
        return
    rows = [row for arm in arms for run in arm.runs for row in run.evals]
    known = sorted({key for row in rows for key, value in row.items() if finite(value) is not None})
    if known:
        raise UserError(
            f"No evaluation has a number called {metric!r}. Choose one of {', '.join(map(plain, known))} with --metric."
        )


def _report(analysis: Analysis, ledger: Ledger, title: str) -> ReportFiles:
    return ReportFiles(
        folder=Path("report"),
        title=title,
        headlines=headlines(analysis),
        notes=notes(analysis),
        method=method(analysis),
        tables=tables(analysis),
        charts=charts(analysis),
        ledger=ledger,
        analysis=analysis,
    )


def _write(report: ReportFiles, folder: Path, kinds: Sequence[str]) -> ReportFiles:
    report = replace(report, folder=folder)
    pictures: dict[str, bytes] = {}
    if kinds and report.analysis:
        from .figures import printed  # matplotlib, which a report without figures does not load

        pictures = {f"figures/{name}": content for name, content in printed(report.analysis, kinds)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pictures:
            (folder / "figures").mkdir(exist_ok=True)
        for name, content in pictures.items():
            write_atomic(folder / name, content)
        write_atomic(report.html, to_html(report))
        write_atomic(report.markdown, to_markdown(report, [name for name in pictures if name.endswith(".png")]))
        for name, path in report.csv.items():
            write_atomic(path, report.tables[name].to_csv())
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {folder}: {error.strerror or error}. Choose another folder with --output."
        ) from error
    return report


def print_summary(report: ReportFiles, console: Console) -> None:
    """Print the headlines, the table of arms in at most 80 columns, the notes and the paths of the files."""
    source = report.tables["final"]
    shown = [index for index, column in enumerate(source.columns) if column.title in _SHOWN]
    table = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for index in shown:
        column = source.columns[index]
        justify = "left" if column.is_text else "right"
        table.add_column(_SHORT.get(column.title, column.title), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for cells in source.cells():
        table.add_row(*(escape(plain(cells[index])) for index in shown))
    first, *others = map(safe_text, report.headlines)
    remarks = [f"[yellow]Note:[/yellow] {safe_text(note)}" for note in report.notes]
    for part in (f"[bold]{first}[/bold]", *others, table, *remarks):
        console.print(part, width=min(console.width, 80), highlight=False, soft_wrap=False)
    for path in (report.html, report.speedup):
        console.print(safe_text(path), soft_wrap=True, highlight=False)
