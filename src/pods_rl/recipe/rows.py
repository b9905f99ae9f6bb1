"""A look at the JSONL files a recipe names, before torch is loaded: a broken row is told at once, by its line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .fields import suggest

_MOST_BYTES = 64 << 20  # read at once; what lies further on is the loader's to find


class Rows(NamedTuple):
    """The columns of a file's first row, how many rows were read, and whether those are all."""

    columns: list[str]
    number: int
    whole: bool


def check_rows(key: str, path: Path, values: Mapping[str, Any]) -> None:
    """Raises UserError where a JSONL file has no rows, a broken one, other columns, or too few to evaluate."""
    rows = read_rows(key, path)
    for column in ("question_column", "answer_column"):
        wanted = values[column]
        if wanted is not None and wanted not in rows.columns:
            raise UserError(
                f"{column} = {wanted}: {path} has the columns {', '.join(rows.columns)}."
                f"{suggest(wanted, rows.columns) or ' Name one of them.'}"
            )
    if key == "dataset_test_name" and rows.whole:
        check_eval_prompts(values, rows.number, str(path))


def check_eval_prompts(values: Mapping[str, Any], available: int, where: str) -> None:
    """Raises UserError where more prompts are to be evaluated than the test split has."""
    wanted = values["eval_prompts"]
    if wanted is not None and wanted > available:
        raise UserError(
            f"eval_prompts = {wanted}: {where} holds {available} prompts to test: set {available} or fewer, or null "
            "for all of them."
        )


def read_rows(key: str, path: Path) -> Rows:
    """Read a JSONL file as far as `_MOST_BYTES` go; raises UserError for the first line that is no JSON object."""
    columns: list[str] = []
    count = read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                if read > _MOST_BYTES:
                    return Rows(columns, count, whole=False)
                if line.strip():
                    row = _row(line, f"{key} = {path}, line {number}")
                    columns = columns or list(row)
                    count += 1
    except OSError as error:
        raise UserError(f"{key} = {path}: cannot be read: {error.strerror}. Name another file.") from error
    if count == 0:
        raise UserError(f"{key} = {path}: holds no rows: expected a JSON object on each line.")
    return Rows(columns, count, whole=True)


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
