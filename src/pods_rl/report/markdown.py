"""A report in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .account import Account
from .tables import Table
from .text import markdown


def to_markdown(account: Account, pictures: Sequence[str] = ()) -> str:
    """Return the sentences, every table that has rows, and pictures by their paths from the report.

    The notes follow the table of the result.
    """
    parts = [f"# PODS report: {markdown(account.title)}", f"**{markdown(account.opening[0])}**"]
    parts += [markdown(line) for line in account.opening[1:]]
    for name, table in account.tables.items():
        if table.cells:
            parts += [f"## {markdown(table.title)}", _table(table), markdown(table.note)]
        if name == "result":
            parts += [_bullets(account.details), _bullets(account.notes)]
    for path in pictures:
        name = path.rpartition("/")[2]
        parts.append(f"![{name}]({path})")
    parts += ["## How these numbers were computed", _bullets(account.method)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(line)}" for line in lines)


def _table(table: Table) -> str:
    titles = []
    alignments = []
    for column in table.columns:
        titles.append(column.title)
        if column.is_text:
            alignments.append("---")
        else:
            alignments.append("---:")
    lines = [_row(titles), f"|{'|'.join(alignments)}|"]
    for cells in table.cells:
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(markdown, cells))} |"
