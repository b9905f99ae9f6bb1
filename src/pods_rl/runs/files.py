"""The files of a run directory: their names, and how each kind is read and written whole."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

CONFIG, ENVIRONMENT, STATUS = "config.yaml", "environment.json", "status.json"
METRICS, EVALS, ROLLOUTS, CHECKPOINTS = "metrics.jsonl", "evals.jsonl", "rollouts", "checkpoints"
EVALUATIONS = "evaluations"


def read_jsonl(path: Path, skipped: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. A torn line, or one that holds something else, is skipped.

    ``skipped`` gets the numbers of the skipped lines, from 1; an unfinished last line does not count: it may still be
    written.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, IsADirectoryError):
        return
    for number, line in enumerate(lines, start=1):
        row = None
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
        if isinstance(row, dict):
            yield row
        elif skipped is not None and line.strip() and number < len(lines):
            skipped.append(number)


def read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def step_of(path: Path) -> int:
    match = re.search(r"-(\d+)(?:\.\w+)?$", path.name)
    return int(match[1]) if match else -1


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one move, so that a reader sees the old text or the new, never half of one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_parquet(target: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """A table in one move, its folder made where there is none; text that UTF-8 cannot hold is escaped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    try:
        table = pa.table({_storable(name): [_storable(value) for value in column] for name, column in columns.items()})
        pq.write_table(table, part, compression="zstd")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _storable(value: Any) -> Any:
    """A lone surrogate becomes an escape, as in our JSON."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def to_json(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """Strict JSON of anything a run logs: numpy and torch scalars unwrapped, what is not finite as null.

    ``ascii_only`` escapes all other characters, for where a terminal may read it.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)})
    '{"loss": null, "steps": [1, 2]}'
    """
    text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    return text.replace("\x7f", "\\u007f") if ascii_only else text


def _plain(value: Any) -> Any:
    """JSON's own types: scalars of numpy and torch unwrapped, paths as text, what is not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
