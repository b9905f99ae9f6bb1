"""Rollouts as JSONL, Parquet or data sets of the hub: read with their rewards, and written to files."""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from ..errors import UserError
from ..runs.files import check_output, write_output, writing
from ..text import DEEPEST, depth, short, suggest

HUB = "hf://"
ADDED = ("selected_rank", "advantage")  # columns of kept rows
_QUOTED = 43  # characters to quote of a bad line


@dataclass
class Rollout:
    """One rollout of the input: its values, group and reward (NaN: unscored).

    ``rank`` and ``advantage`` are set for kept rollouts; rank 1 is the highest reward among those kept in a group.
    """

    values: dict[str, Any]
    group: str
    reward: float
    rank: int = 0
    advantage: float = 0.0


# -- reading ----------------------------------------------------------------------------------------------------------


def read_rollouts(source: str, group_by: str, reward_key: str, split: str = "train") -> tuple[list[Rollout], list[str]]:
    """Return the rollouts of a file, a directory or a data set of the hub, and the problem of each bad line."""
    rows: list[Rollout] = []
    bad: list[str] = []
    try:
        for file, place, item in _items(source, split):
            try:
                values = _parse(item) if isinstance(item, bytes) else item
                rows.append(_rollout(values, file, group_by, reward_key))
            except ValueError as error:
                bad.append(f"{file} {place}: {error}".lstrip())
    except (OSError, UnicodeEncodeError) as error:  # the second: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot read {source}: {reason}. Give a file, or {HUB}owner/name.") from error
    return rows, bad


def _items(source: str, split: str) -> Iterator[tuple[str, str, bytes | dict[str, Any]]]:
    """Yield each row's file (empty unless it is one of a directory), position, and content: a JSON line or a row."""
    path = Path(source)
    if source.startswith(HUB):
        for number, row in enumerate(_hub_rows(source.removeprefix(HUB), split), start=1):
            yield "", f"row {number}", row
    elif files := _parquet_files(source):
        for file in files:
            for number, row in enumerate(_parquet_rows(file), start=1):
                yield file.name if path.is_dir() else "", f"row {number}", row
    elif path.is_dir():
        raise UserError(f"{path} holds no Parquet file: expected a run's rollouts/ directory.")
    elif source == "-" and sys.stdin is None:
        raise UserError("Standard input is closed: name a file, or pipe the rollouts in.")
    else:
        with nullcontext(sys.stdin.buffer) if source == "-" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield "", f"line {number}", line


def _parquet_files(source: str) -> list[Path]:
    """Return the Parquet files of a directory, or a file whose name ends in .parquet, or nothing."""
    path = Path(source)
    if path.is_dir():
        return sorted(path.glob("*.parquet"))
    return [path] if path.suffix == ".parquet" and not source.startswith(HUB) else []


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a complete Parquet file: {_one_line(error)}") from error
    except (ValueError, OverflowError, LookupError) as error:  # such as a date beyond the year 9999
        raise UserError(f"{path} holds a value that Python cannot represent: {_one_line(error)}") from error


def _hub_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII):
        raise UserError(f"{HUB}{name}: expected a data set of the hub as hf://owner/name.")
    try:
        yield from datasets.load_dataset(name, split=split)
    except Exception as error:  # of the hub, the network or the library
        how = "Check the name, --split, HF_TOKEN and the network."
        raise UserError(f"{HUB}{name}: cannot read split {split}: {_one_line(error)} {how}") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {line[error.start]:#04x} at position {error.start + 1})") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"is not a JSON object but {short(str(values), _QUOTED)}")
    return values


def _rollout(values: dict[str, Any], file: str, group_by: str, reward_key: str) -> Rollout:
    """Return the rollout of a line's values; raise ValueError if a key is missing or wrong."""
    if depth(values) > DEEPEST:
        raise ValueError(f"is nested too deeply: expected {DEEPEST} levels at most")
    for key, option in ((group_by, "--group_by"), (reward_key, "--reward_key")):
        if key not in values:
            there = short(", ".join(map(repr, values)) or "none", 200)
            raise ValueError(
                f"has no key {short(repr(key), _QUOTED)}; it has {there}.{suggest(key, values)} {option} names the key"
            )
    reward = values[reward_key]
    try:
        number = math.nan if reward is None else math.inf
        if isinstance(reward, bool | int | float | Decimal):
            number = float(reward)
    except (OverflowError, ValueError):
        number = math.inf
    if math.isinf(number):
        raise ValueError(
            f"its {reward_key} is {short(repr(reward), _QUOTED)}, expected a finite number, true, false or null"
        )
    return Rollout(values, file + json.dumps(values[group_by], sort_keys=True, default=str), number)


# -- writing ----------------------------------------------------------------------------------------------------------


def check_rows_output(output: str, source: str, *, force: bool) -> None:
    """Raise UserError, before anything is read, if the rows cannot be written."""
    if output.startswith(HUB):
        raise UserError(f"--output {output}: expected a file. Push its rows with the datasets library.")
    if output != "-":
        check_output(Path(output), "--output", inputs=[Path(source)], ours=_are_kept_rows, force=force)
    elif sys.__stdout__ is None:
        raise UserError("--output -: standard output is closed. Give a file.")


def _are_kept_rows(path: Path) -> bool:
    """Return whether `pods select` wrote a file: its rows have the columns that it adds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            return set(ADDED) <= set(pq.read_schema(path).names)
        with path.open("rb") as file:
            return set(ADDED) <= set(_parse(file.readline()))
    except (pa.ArrowException, ValueError):
        return False


def write_rows(rows: Iterable[dict[str, Any]], output: str, source: str) -> None:
    """Write rows as Parquet if the output's name ends in .parquet, as JSONL otherwise.

    Raises UserError for a value that the format cannot hold, and for a full disk.
    """
    from ..runs import to_json

    if output.endswith(".parquet"):
        _write_table(list(rows), output, source)
        return
    plain = ({key: _json_value(value, key, output) for key, value in row.items()} for row in rows)
    text = "".join(to_json(row, ascii_only=output == "-") + "\n" for row in plain)
    if output == "-":
        sys.stdout.write(text)
    else:
        write_output(Path(output), "--output", text)


def _json_value(value: Any, place: str, output: str) -> Any:
    """Return a value as JSON holds it: NaN as null, dates and times in ISO 8601, decimals as numbers if exact."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json_value(item, f"{place}.{key}", output) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item, place, output) for item in value]
    if isinstance(value, Decimal) and value.is_finite() and Decimal(repr(float(value))) == value:
        return float(value)
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, float) and not math.isinf(value):
        return None if math.isnan(value) else value
    if value is None or isinstance(value, (str, int, UUID)):
        return value
    kind = "infinity" if isinstance(value, float) else type(value).__name__
    raise UserError(
        f"--output {output}: {place} holds a value of type {kind}, which JSON cannot hold exactly. Write Parquet: give "
        "a name that ends in .parquet."
    )


def _write_table(rows: list[dict[str, Any]], output: str, source: str) -> None:
    """Write rows as Parquet, with the types of a Parquet source; a column that a row lacks is null there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays, types, column, buffer = {}, {}, "a column", pa.BufferOutputStream()
    if files := _parquet_files(source):
        with suppress(pa.ArrowException):  # the files' types may differ
            schema = pa.unify_schemas([pq.read_schema(file) for file in files])
            types = {field.name: field.type for field in schema if field.name not in ADDED}
    try:
        for column in dict.fromkeys(key for row in rows for key in row):
            arrays[column] = pa.array([row.get(column) for row in rows], type=types.get(column))
        pq.write_table(pa.table(arrays), buffer)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise UserError(
            f"--output {output}: Parquet cannot hold the values of {column} ({_one_line(error)}). Write JSONL, for "
            "example to a name that ends in .jsonl."
        ) from error
    with writing(Path(output), "--output") as file:
        file.write(buffer.getvalue())


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
