"""The report in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..text import safe_text
from .build import ReportFiles
from .text import plain

_SHORT = {
    "final, 95 % interval": "final [95 %]",
    "speedup, 95 % interval": "speedup [95 %]",
    "final format": "format",
}
_LEFT_OUT = {"peak", "s/step"}  # what a line of 80 columns has no room for


def print_summary(report: ReportFiles, console: Console) -> None:
    """The headlines, the table of arms in at most 80 columns, the notes and the paths of the files."""
    source = report.tables["final"]
    shown = [index for index, column in enumerate(source.columns) if column.title not in _LEFT_OUT]
    table = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for index in shown:
        column = source.columns[index]
        justify = "left" if column.is_text else "right"
        table.add_column(_SHORT.get(column.title, column.title), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for cells in source.cells():
        table.add_row(*(escape(plain(cells[index])) for index in shown))
    width = min(console.width, 80)
    for rank, headline in enumerate(report.analysis.headlines):
        style = "bold" if rank == 0 else None
        console.print(safe_text(headline), style=style, width=width, highlight=False, soft_wrap=False)
    console.print(table, width=width)
    for note in report.analysis.notes:
        console.print(f"[yellow]Note:[/yellow] {safe_text(note)}", width=width, highlight=False, soft_wrap=False)
    for path in (report.html, report.png, report.speedup):
        console.print(safe_text(path), soft_wrap=True, highlight=False)
