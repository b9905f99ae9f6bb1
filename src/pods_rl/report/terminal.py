"""A report's summary in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..text import safe_text
from .account import Account
from .tables import Table
from .text import plain

_WIDTH = 80


def print_account(account: Account, console: Console) -> None:
    """Print the headlines, the table of arms in at most 80 columns, and the notes."""
    headline, *details = map(safe_text, account.headlines)
    parts = [f"[bold]{headline}[/bold]", *details, _table(account.tables["final"])]
    for note in account.notes:
        parts.append(f"[yellow]Note:[/yellow] {safe_text(note)}")
    for part in parts:
        console.print(part, width=min(console.width, _WIDTH), highlight=False, soft_wrap=False)


def _table(table: Table) -> RichTable:
    """Return the columns of a table that have a title for the terminal."""
    rich_table = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    shown = []
    for place, column in enumerate(table.columns):
        if not column.terminal:
            continue
        shown.append(place)
        if column.is_text:
            rich_table.add_column(column.terminal, justify="left", overflow="fold")
        else:
            rich_table.add_column(column.terminal, justify="right", overflow="fold")
    for cells in table.cells:
        rich_table.add_row(*(escape(plain(cells[place])) for place in shown))
    return rich_table
