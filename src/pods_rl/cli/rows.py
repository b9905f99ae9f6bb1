"""Rows of rollouts in data sets of the hub, Parquet and JSONL: checked, read from the hub, written."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

HUB = "hf://"


def check_output(output: str | None) -> None:
    """Raise UserError, before anything is read, if the rows cannot be written."""
    if output is not None and output.startswith(HUB):
        from ..recipe.available import check_pushable

        hub_name(output, "--output")
        check_pushable("--output")
    elif output is not None and Path(output).is_dir():
        raise UserError(f"--output {output} is a directory: give a file.")


def hub_name(address: str, what: str) -> str:
    name = address.removeprefix(HUB).removeprefix("datasets/").strip("/")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII):
        raise UserError(f"{what} {address}: expected a data set of the hub as hf://owner/name.")
    return name


def hub_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub's, the network's, or the library's own
        raise UserError(
            f"{HUB}{name}: cannot read split {split}: {' '.join(str(error).split())[:300]} Check the name, --split, "
            "HF_TOKEN and the network."
        ) from error


def write_rows(rows: Iterable[dict[str, Any]], output: str, split: str) -> None:
    """Write rows as JSONL, as Parquet, or as a data set of the hub, as the name of the output says."""
    from ..runs import to_json, write_atomic

    printed = output == "-"
    if output.startswith(HUB) or output.endswith(".parquet"):
        _write_table(list(rows), output, split)
        return
    text = "".join(to_json(row, ascii_only=printed) + "\n" for row in rows)
    if printed:
        sys.stdout.write(text)
        return
    try:
        write_atomic(Path(output), text, follow=True)
    except OSError as error:
        raise UserError(f"Cannot write {output}: {error.strerror}.") from error


def _write_table(rows: list[dict[str, Any]], output: str, split: str) -> None:
    """Write rows as Parquet, or as a data set of the hub; a column that a row lacks is null there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ..runs.files import replacing

    columns = list(dict.fromkeys(key for row in rows for key in row))
    try:
        table = pa.table({key: [row.get(key) for row in rows] for key in columns})
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--output {output}: a column holds values of different types ({reason}). Write JSONL instead."
        ) from error
    if not output.startswith(HUB):
        try:
            with replacing(Path(output), follow=True) as file:
                pq.write_table(table, file)
        except OSError as error:
            raise UserError(f"Cannot write {output}: {error.strerror}.") from error
        return
    import datasets

    name = hub_name(output, "--output")
    try:
        datasets.Dataset(table).push_to_hub(name, split=split)
    except Exception as error:  # the hub's, the network's, or the library's own
        raise UserError(
            f"{output}: not pushed: {' '.join(str(error).split())[:300]} Write a file with --output kept.parquet, "
            "or try again."
        ) from error
