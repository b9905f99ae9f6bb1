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
    """Print the result in at most 80 columns: its table, how many times faster, and the notes."""
    parts: list[RichTable | str] = []
    if account.tables["result"].cells:
        parts.append(_table(account.tables["result"]))
    parts += map(safe_text, account.details)
    for note in account.notes:
        parts.append(f"[yellow]Note:[/yellow] {safe_text(note)}")
    for part in parts:
        _print(part, console)


def print_opening(account: Account, console: Console) -> None:
    """Print the sentences that open the report in the other outputs. A terminal shows its last lines."""
    for line in account.opening:
        _print(f"[bold]{safe_text(line)}[/bold]", console)


def _print(part: RichTable | str, console: Console) -> None:
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
