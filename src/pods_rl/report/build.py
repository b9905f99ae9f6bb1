"""A report from run directories or a CSV: an HTML page, Markdown, CSV files, and a summary for the terminal.

The page needs no network and runs no script but ours; everything from outside is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..errors import UserError
from ..runs import find_runs, write_atomic
from ..text import safe_text
from .analysis import Analysis, analyse
from .arms import Arm, arms_from_csv, arms_from_runs
from .charts import Chart, charts
from .ledger import DATA_MB, Ledger, ledger_of
from .tables import Table, tables
from .text import finite, markdown, plain
from .wording import headlines, method, notes

_KINDS = ("pdf", "svg", "png")
_MOST_MB = 2000.0  # a browser holds no larger page
_SCRIPTS = ("vendor/uPlot.iife.min.js", "templates/figures.js", "templates/ledger.js", "templates/start.js")
_LIVE = "templates/watch.js"
_FOLDED = 24  # rows of a table from which it is closed at first


@dataclass(frozen=True, eq=False)
class ReportFiles:
    """The content of a report, and the paths of its files; a page that waits for runs has a title and a headline."""

    folder: Path
    title: str
    headlines: tuple[str, ...]
    notes: tuple[str, ...] = ()
    method: tuple[str, ...] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    charts: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    analysis: Analysis | None = None

    @property
    def html(self) -> Path:
        return self.folder / "report.html"

    @property
    def markdown(self) -> Path:
        return self.folder / "report.md"

    @property
    def csv(self) -> dict[str, Path]:
        """By table: final, pairs, speedup, ablations, curves, runs, config."""
        return {name: self.folder / f"{name}.csv" for name, table in self.tables.items() if table.keys}


def build_report(
    sources: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = "grpo",
    metric: str | None = None,
    figures: Sequence[str] = (),
    rollouts_mb: float = DATA_MB,
) -> ReportFiles:
    """Read runs and write ``report.html``, ``report.md`` and a CSV of every table.

    Args:
        sources: an experiment directory, a run directory, several of either, or a CSV of evaluations (its columns:
            ``arms_from_csv``), whose report has neither phases nor rollouts.
        output: folder to write to; by default ``report`` inside the one directory, or next to the CSV or several.
        baseline: the arm that the others are compared with. If None, arms are not compared.
        metric: the field of ``evals.jsonl`` or the column to compare by. None: ``accuracy``, of a CSV
            ``answer_accuracy``, and ``reward`` of runs whose task grades no answer.
        figures: formats (``pdf``, ``svg``, ``png``) of figures for a paper, written to ``figures/``.
        rollouts_mb: approximate megabytes of rollouts on the page. It says how many groups did not fit.

    Raises:
        UserError: if no run is found, if runs were evaluated but never on ``metric``, if none of
            several arms is called ``baseline``, and if a format is unknown.
        OSError: if the folder cannot be written.
    """
    if isinstance(sources, (str, Path)):
        sources = [sources]
    paths = [Path(source) for source in sources]
    unknown = {*figures} - {*_KINDS}
    if unknown:
        raise UserError(f"--figures {plain(min(unknown))}: no such format. Choose among {', '.join(_KINDS)}.")
    report = read_report(paths, baseline=baseline, metric=metric, rollouts_mb=rollouts_mb)
    folder = _usual_folder(paths) if output is None else Path(output)
    report = replace(report, folder=folder)
    pictures: dict[str, bytes] = {}
    if figures and report.analysis:
        from .figures import printed  # matplotlib, which a report without figures does not load

        for name, picture in printed(report.analysis, figures):
            pictures[f"figures/{name}"] = picture
    # every file is made before one is written, so that an error leaves an old report as it is
    contents: dict[str, str | bytes] = {
        "report.html": to_html(report),
        "report.md": to_markdown(report, [name for name in pictures if name.endswith(".png")]),
        **pictures,
    }
    for name, path in report.csv.items():
        contents[path.name] = report.tables[name].to_csv()
    folder.mkdir(parents=True, exist_ok=True)
    if pictures:
        (folder / "figures").mkdir(exist_ok=True)
    for name, content in contents.items():
        write_atomic(folder / name, content)
    return report


def _usual_folder(paths: Sequence[Path]) -> Path:
    """Return ``report`` inside the one directory, or next to a CSV or several directories."""
    if len(paths) == 1 and not _is_csv(paths):
        return paths[0] / "report"
    parents = [os.path.dirname(os.path.realpath(path)) for path in paths]
    return Path(os.path.commonpath(parents), "report")


def _is_csv(paths: Sequence[Path]) -> bool:
    return len(paths) == 1 and (paths[0].is_file() or paths[0].suffix == ".csv")


def read_report(
    paths: Sequence[Path], *, baseline: str | None, metric: str | None = None, rollouts_mb: float = DATA_MB
) -> ReportFiles:
    """Return the report of runs without writing it; arguments as of ``build_report``."""
    if not 0 <= rollouts_mb <= _MOST_MB:
        raise UserError(f"--rollouts_mb must be between 0 and {_MOST_MB:g}: got {rollouts_mb}.")
    if _is_csv(paths):
        metric = metric or "answer_accuracy"
        arms = arms_from_csv(paths[0], metric)
        if not any(arm.curve for arm in arms):
            raise UserError(f"No evaluation has a number called {metric!r}. Choose another with --metric.")
    else:
        metric = metric or _usual_metric(paths)
        arms = arms_from_runs(paths, metric)
        measured = _measured(arms)
        if measured and not any(arm.curve for arm in arms):
            names = ", ".join(map(plain, sorted(measured)))
            raise UserError(f"No evaluation has a number called {metric!r}. Choose another with --metric: {names}.")
    analysis = analyse(arms, baseline=baseline, metric=metric)
    title = f"{len(paths)} runs"
    if len(paths) == 1:
        title = os.path.basename(os.path.realpath(paths[0]))
    return ReportFiles(
        folder=Path("report"),
        title=title,
        headlines=headlines(analysis),
        notes=notes(analysis),
        method=method(analysis),
        tables=tables(analysis),
        charts=charts(analysis),
        ledger=ledger_of(analysis.arms, data_mb=rollouts_mb),
        analysis=analysis,
    )


def _measured(arms: Sequence[Arm]) -> set[str]:
    """Return the fields of all evaluations that hold a number."""
    measured: set[str] = set()
    for arm in arms:
        for run in arm.runs:
            for row in run.evals:
                measured |= {key for key, value in row.items() if finite(value) is not None}
    return measured


def _usual_metric(paths: Sequence[Path]) -> str:
    """Return ``accuracy``, or ``reward`` if every evaluation has rewards instead, since no grader was used."""
    metric = "accuracy"
    for row in _evaluations(paths):
        if "reward" not in row or "accuracy" in row:
            return "accuracy"
        metric = "reward"
    return metric


def _evaluations(paths: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    for path in paths:
        for runs in find_runs(path).values():
            for run in runs:
                yield from run.evals


# ------------------------------------------------------------------------------------------- the page


def to_html(report: ReportFiles, *, live: bool = False, parts: bool = False) -> str:
    """Return the page. The template escapes names, logs and model output, and nothing but our own style and scripts.

    Args:
        report: what to show.
        live: with the script that `pods watch` serves, and permission to ask its server.
        parts: without style, scripts and data: what `pods watch` exchanges in a page that is open.
    """
    scripts: list[Markup] = []
    style = Markup("")
    policy = ""
    if not parts:
        names = [*_SCRIPTS, _LIVE] if live else _SCRIPTS
        scripts = [Markup(_asset(name)) for name in names]  # trusted: files of the package
        style = Markup(_asset("vendor/uPlot.min.css") + _asset("templates/report.css"))
        policy = content_security_policy(style, *scripts, live=live)
    return _template().render(
        report=report, tables=report.tables, folded=_FOLDED, policy=policy, style=style, scripts=scripts
    )


def content_security_policy(style: str, *scripts: str, live: bool = False) -> str:
    """Allow data: images and, by their hashes, one style sheet and these scripts; style attributes for the bars.

    >>> content_security_policy("")[:84]
    "default-src 'none'; img-src data:; style-src-attr 'unsafe-inline'; style-src-elem 's"
    """
    rules = [
        "default-src 'none'",
        "img-src data:",
        "style-src-attr 'unsafe-inline'",
        f"style-src-elem {_hash(style)}",
        f"script-src {' '.join(map(_hash, scripts))}",
        "require-trusted-types-for 'script'",
    ]
    if live:
        rules.append("connect-src 'self'")
    rules += ["base-uri 'none'", "form-action 'none'"]
    return "; ".join(rules)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": plain}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_asset("templates/report.html.j2"))


# ------------------------------------------------------------------------------------ Markdown, terminal


def to_markdown(report: ReportFiles, pictures: Sequence[str] = ()) -> str:
    """Return the headlines, the notes, every table that has rows, and pictures by their paths from the report."""
    parts = [f"# PODS report: {markdown(report.title)}", f"**{markdown(report.headlines[0])}**"]
    parts += [_bullets(report.headlines[1:]), _bullets(report.notes)]
    for table in report.tables.values():
        if table.cells():
            parts += [f"## {markdown(table.title)}", table.to_markdown(), markdown(table.note)]
    parts += [f"![{path.rpartition('/')[2]}]({path})" for path in pictures]
    parts += ["## How these numbers were computed", _bullets(report.method)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(line)}" for line in lines)


def print_summary(report: ReportFiles, console: Console) -> None:
    """Print the headlines, the table of arms in at most 80 columns, the notes and the paths of the files."""
    headline, *details = map(safe_text, report.headlines)
    notes_in_colour = [f"[yellow]Note:[/yellow] {safe_text(note)}" for note in report.notes]
    for part in (f"[bold]{headline}[/bold]", *details, _terminal_table(report.tables["final"]), *notes_in_colour):
        console.print(part, width=min(console.width, 80), highlight=False, soft_wrap=False)
    for path in (report.html, report.csv["speedup"]):
        console.print(safe_text(path), soft_wrap=True, highlight=False)


def _terminal_table(table: Table) -> RichTable:
    """Return the columns of a table that have a title for the terminal."""
    columns = [column for column in table.columns if column.terminal]
    rich_table = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for column in columns:
        rich_table.add_column(column.terminal, justify="left" if column.is_text else "right", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*(escape(plain(column.cell(row))) for column in columns))
    return rich_table
