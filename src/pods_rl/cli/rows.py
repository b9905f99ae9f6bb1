"""Rollouts as JSONL, Parquet or data sets of the hub: read with their rewards, and written."""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

from ..errors import UserError
from ..runs.outputs import check_output, write_output, writing
from ..text import DEEPEST, depth

HUB = "hf://"
ADDED = ("selected_rank", "advantage")  # columns of kept rows
BAD_LINES_SHOWN = 10
_QUOTED = 43  # characters to quote of a bad line
_LONGEST_LINE = 1 << 26  # bytes; the longest completions have a few million
_BOM = b"\xef\xbb\xbf"


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
    """Return the rollouts of a file, a directory or a data set of the hub, and the problem of each bad line.

    Only the first ten problems have a text.
    """
    rows: list[Rollout] = []
    bad: list[str] = []
    try:
        for file, place, item in _items(source, split):
            try:
                values = _parse(item) if isinstance(item, bytes) else item
                rows.append(_rollout(values, file, group_by, reward_key))
            except ValueError as error:
                bad.append(f"{file} {place}: {error}".lstrip() if len(bad) < BAD_LINES_SHOWN else "")
    except OSError as error:
        may_be_hub = isinstance(error, FileNotFoundError) and re.fullmatch(r"[\w-]+/[\w-]+", source, re.ASCII)
        hint = f" For a data set of the hub, give {HUB}{source}." if may_be_hub else ""
        raise UserError(f"Cannot read {source}: {error.strerror or error}.{hint}") from error
    except UnicodeEncodeError as error:
        raise UserError(f"Cannot read {source}: no file has such a name.") from error
    return rows, bad


def _items(source: str, split: str) -> Iterator[tuple[str, str, bytes | dict[str, Any]]]:
    """Yield each row's file (empty unless there are several), position, and content: a JSON line or a row."""
    path = Path(source)
    if source.startswith(HUB):
        for number, row in enumerate(_hub_rows(_hub_name(source, "pods select"), split), start=1):
            yield "", f"row {number}", row
    elif source == "-":
        if sys.stdin is None:
            raise UserError("Standard input is closed: name a file, or pipe the rollouts in.")
        yield from _lines(sys.stdin.buffer, path)
    elif path.is_dir():
        files = _parquet_files(path)
        if not files:
            raise UserError(f"{path} holds no Parquet file: expected a run's rollouts/ directory.")
        for file in files:
            yield from _parquet(file, file.name)
    elif _parquet_files(path):
        yield from _parquet(path, "")
    else:
        with path.open("rb") as lines:
            yield from _lines(lines, path)


def _parquet_files(path: Path) -> list[Path]:
    """Return a Parquet file alone, the Parquet files of a directory, or nothing."""
    if path.is_dir():
        return sorted(path.glob("*.parquet"))
    if not path.is_file():  # a pipe can be read once
        return []
    with path.open("rb") as file:
        return [path] if file.read(4) == b"PAR1" else []


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, str, bytes]]:
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        if len(line) == _LONGEST_LINE:
            raise UserError(
                f"{path}: line {number} has {_LONGEST_LINE:,} bytes or more: expected a rollout on each line."
            )
        text = line.removeprefix(_BOM) if number == 1 else line
        if text.strip():
            yield "", f"line {number}", text


def _parquet(path: Path, name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = (row for batch in pq.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield name, f"row {number}", row
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a complete Parquet file: {_first_line(error)}") from error
    except (ValueError, OverflowError, LookupError) as error:  # such as a date beyond the year 9999
        raise UserError(f"{path} holds a value that Python cannot represent: {_first_line(error)}") from error


def _hub_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(name, split=split)
    except Exception as error:  # of the hub, the network or the library
        raise UserError(
            f"{HUB}{name}: cannot read split {split}: {' '.join(str(error).split())[:300]} Check the name, --split, "
            "HF_TOKEN and the network."
        ) from error


def _hub_name(address: str, what: str) -> str:
    name = address.removeprefix(HUB).removeprefix("datasets/").strip("/")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII):
        raise UserError(f"{what} {address}: expected a data set of the hub as hf://owner/name.")
    return name


def _parse(line: bytes) -> dict[str, Any]:
    from ..text import short

    try:
        values = json.loads(line.decode("utf-8"))
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
    from ..text import short, suggest

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
        from ..recipe.available import check_pushable

        _hub_name(output, "--output")
        check_pushable("--output")
    elif output != "-":
        check_output(Path(output), "--output", inputs=[Path(source)], ours=_are_kept_rows, force=force)
    elif sys.__stdout__ is None:
        raise UserError("--output -: standard output is closed. Give a file.")


def _are_kept_rows(path: Path) -> bool:
    """Return whether `pods select` wrote a file: its rows have the columns that it adds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if _parquet_files(path):
            names = pq.read_schema(path).names
        else:
            with path.open("rb") as file:
                names = _parse(file.readline(_LONGEST_LINE))
    except (pa.ArrowException, ValueError):
        return False
    return set(ADDED) <= set(names)


def write_rows(rows: Iterable[dict[str, Any]], output: str, source: str, split: str) -> None:
    """Write rows in the format that the name of the output selects: JSONL, Parquet or a data set of the hub.

    Raises:
        UserError: a value that the format cannot hold, a full disk, a push that failed.
    """
    from ..runs import to_json

    printed = output == "-"
    if output.startswith(HUB) or output.endswith(".parquet"):
        _write_table(list(rows), output, source, split)
        return
    plain = ({key: _json_value(value, key, output) for key, value in row.items()} for row in rows)
    text = "".join(to_json(row, ascii_only=printed) + "\n" for row in plain)
    if printed:
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


def _write_table(rows: list[dict[str, Any]], output: str, source: str, split: str) -> None:
    """Write rows as Parquet, or as a data set of the hub; a column that a row lacks is null there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = _column_types(source)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    buffer = pa.BufferOutputStream()
    column = ""
    try:
        arrays = {}
        for column in columns:
            arrays[column] = pa.array([row.get(column) for row in rows], type=types.get(column))
        column = "a column"
        table = pa.table(arrays)
        pq.write_table(table, buffer)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise UserError(
            f"--output {output}: Parquet cannot hold the values of {column} ({_first_line(error)}). Write JSONL, for "
            "example to a name that ends in .jsonl."
        ) from error
    if not output.startswith(HUB):
        with writing(Path(output), "--output") as file:
            file.write(buffer.getvalue())
        return
    import datasets

    try:
        datasets.Dataset(table).push_to_hub(_hub_name(output, "--output"), split=split)
    except Exception as error:  # of the hub, the network or the library
        raise UserError(
            f"{output}: not pushed: {' '.join(str(error).split())[:300]} Write a file with --output kept.parquet, "
            "or try again."
        ) from error


def _column_types(source: str) -> dict[str, Any]:
    """Return the types of a Parquet source's columns, so that rows keep them; empty for other sources."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        files = [] if source == "-" or source.startswith(HUB) else _parquet_files(Path(source))
        schema = pa.unify_schemas([pq.read_schema(file) for file in files]) if files else []
    except pa.ArrowException:  # the files differ
        return {}
    return {field.name: field.type for field in schema if field.name not in ADDED}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
