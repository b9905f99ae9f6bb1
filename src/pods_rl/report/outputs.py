"""The content of a report, and its three outputs: one HTML page, Markdown, and a summary in the terminal.

None of them computes a number, chooses a reference, or decides whether a difference is settled.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable

from .analysis import Analysis
from .charts import Panel, Styles
from .ledger import Ledger
from .tables import CSV_NAMES, Table
from .text import html_text, markdown, one_line, terminal
from .wording import Finding

PAGE = "report.html"
_SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "templates/figures.js",
    "templates/ledger.js",
    "templates/sorting.js",
    "templates/start.js",
)
_FOLDED = 24  # rows of a table from which it is closed at first
_TERMINAL_WIDTH = 80  # columns of a terminal


@dataclass(frozen=True, eq=False)
class Account:
    """The content of a report. If no run has begun, it has only a title and one sentence that opens it."""

    title: str
    findings: tuple[Finding, ...]  # what it says first, and what follows
    notes: tuple[str, ...] = ()  # what limits the numbers
    method: tuple[str, ...] = ()  # how the numbers were computed
    tables: Mapping[str, Table] = field(default_factory=dict)  # by name, in the order of the page
    charts: Mapping[str, Sequence[Panel]] = field(default_factory=dict)
    styles: Styles = field(default_factory=dict)  # of each arm in every figure
    ledger: Ledger = field(default_factory=Ledger)
    analysis: Analysis | None = None  # the numbers

    @property
    def points(self) -> dict[str, Any]:
        """The figures as the page's script reads them."""
        return {name: [panel.data() for panel in panels] for name, panels in self.charts.items()}


@dataclass(frozen=True, eq=False)
class ReportFiles:
    """The content of a report, and the paths of its files."""

    account: Account
    folder: Path

    @property
    def html(self) -> Path:
        return self.folder / PAGE

    @property
    def csv(self) -> dict[str, Path]:
        """By table: final, pairs, curves, runs, config."""
        return {name: self.folder / f"{name}.csv" for name in CSV_NAMES}


# ------------------------------------------------------------------------------------------------ HTML


def to_html(account: Account, *, live: int = 0) -> str:
    """Return the page; with the version `live`, that of `pods watch`, whose script asks its server for a newer one.

    The template escapes names, logs and model output, and nothing but our own style and scripts.
    """
    names = [*_SCRIPTS, "templates/watch.js"] if live else [*_SCRIPTS]
    scripts = [Markup(_asset(name)) for name in names]  # trusted: files of the package
    style = Markup(_asset("vendor/uPlot.min.css") + _asset("templates/report.css"))
    policy = [
        "default-src 'none'",
        "img-src data:",
        "style-src-attr 'unsafe-inline'",  # the heights of bars
        f"style-src-elem {_hash(style)}",
        f"script-src {' '.join(map(_hash, scripts))}",
        "require-trusted-types-for 'script'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if live:
        policy.append("connect-src 'self'")
    return _template().render(
        account=account, folded=_FOLDED, policy="; ".join(policy), style=style, scripts=scripts, version=live
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=html_text
    )
    environment.filters["one_line"] = one_line
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_asset("templates/report.html.j2"))


# -------------------------------------------------------------------------------------------- Markdown


def to_markdown(account: Account) -> str:
    """Return the sentences and every table that has rows."""
    first, *others = account.findings
    parts = [f"# PODS report: {markdown(account.title)}", f"**{markdown(first.sentence)}**"]
    parts += [markdown(finding.sentence) for finding in others]
    for name, table in account.tables.items():
        if table.cells:
            alignments = ["---" if title in table.texts else "---:" for title in table.titles]
            lines = [_markdown_row(table.titles), f"|{'|'.join(alignments)}|", *map(_markdown_row, table.cells)]
            parts += [f"## {markdown(table.title)}", "\n".join(lines), markdown(table.note)]
        if name == "result":
            parts.append(_bullets(account.notes))
    parts += ["## How these numbers were computed", _bullets(account.method)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(line)}" for line in lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(markdown, cells))} |"


# -------------------------------------------------------------------------------------------- terminal


def print_summary(report: ReportFiles, console: Console) -> None:
    """Print the result in at most 80 columns: its table, the notes, the path of the page, and last the findings.

    The other outputs open with the findings; of a terminal, a reader sees the last lines.
    """
    account = report.account
    table = account.tables["result"]
    if table.cells:
        rich_table = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
        titles = [title for title in table.titles if title in table.terminal]
        for title in titles:
            justify: JustifyMethod = "left" if title in table.texts else "right"
            rich_table.add_column(table.terminal[title], justify=justify, overflow="fold")
        for cells in zip(*(table.columns[title] for title in titles), strict=True):
            rich_table.add_row(*(terminal(cell) for cell in cells))
        _print(rich_table, console)
    for note in account.notes:
        _print(f"[yellow]Note:[/yellow] {terminal(note)}", console)
    console.print(terminal(report.html), soft_wrap=True, highlight=False)
    console.print()
    for finding in account.findings:
        _print(f"[bold]{terminal(finding.sentence)}[/bold]", console)


def _print(part: RichTable | str, console: Console) -> None:
    console.print(part, width=min(console.width, _TERMINAL_WIDTH), highlight=False, soft_wrap=False)
