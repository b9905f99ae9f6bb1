"""A look at the JSONL files a recipe names, before torch is loaded: a broken row is told at once, by its line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .fields import suggest

_MOST_BYTES = 64 << 20  # read at once; what lies further on is the loader's to find


def check_rows(key: str, path: Path, values: Mapping[str, Any]) -> None:
    """Raises UserError where a JSONL file has no rows, a broken one, or other columns."""
    columns = read_columns(key, path)
    for column in ("question_column", "answer_column"):
        wanted = values[column]
        if wanted is not None and wanted not in columns:
            raise UserError(
                f"{column} = {wanted}: {path} has the columns {', '.join(columns)}."
                f"{suggest(wanted, columns) or ' Name one of them.'}"
            )


def read_columns(key: str, path: Path) -> list[str]:
    """The columns of a JSONL file's first row, the file read as far as `_MOST_BYTES` go.

    Raises UserError for the first line that is no JSON object.
    """
    columns: list[str] | None = None
    read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                if read > _MOST_BYTES:
                    break
                if line.strip():
                    row = _row(line, f"{key} = {path}, line {number}")
                    columns = list(row) if columns is None else columns
    except OSError as error:
        raise UserError(f"{key} = {path}: cannot be read: {error.strerror}. Name another file.") from error
    if columns is None:
        raise UserError(f"{key} = {path}: holds no rows: expected a JSON object on each line.")
    return columns


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        raise UserError(f"{where}: {shown!r} is no JSON ({_why(error)}): mend that row, or take it out.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: is a {type(row).__name__}: expected a JSON object on each line.")
    return row


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not text in UTF-8"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
