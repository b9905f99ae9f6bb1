"""A table as rows and as columns, as a Parquet file has them. Does not import pyarrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

BATCH = 1000  # rows read at once


def rows_of(columns: Mapping[Any, Sequence[Any]]) -> list[dict[Any, Any]]:
    """Return the rows of columns of the same length.

    >>> rows_of({"step": [1, 2], "reward": [0.5, 1.0]})
    [{'step': 1, 'reward': 0.5}, {'step': 2, 'reward': 1.0}]
    """
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def columns_of(rows: Sequence[Mapping[Any, Any]], missing: Any = None) -> dict[Any, Any]:
    """Return the columns of rows, in the order in which the rows first have them.

    Args:
        rows: of which some may lack a column.
        missing: the value there.

    >>> columns_of([{"step": 1}, {"step": 2, "turns": 3}])
    {'step': [1, 2], 'turns': [None, 3]}
    """
    names = dict.fromkeys(name for row in rows for name in row)  # a set that keeps its order
    return {name: [row.get(name, missing) for row in rows] for name in names}


def rows_hash(dataset: Any) -> str:
    """Return the sha256 of the rows of a `datasets.Dataset`: all columns, in order, wherever they were read."""
    digest = hashlib.sha256()
    encoder = json.JSONEncoder(sort_keys=True, default=repr)  # `json.dumps` would make one for every row
    # As Arrow stores them: an image is then its bytes, and no object of a library.
    for table in dataset.with_format("arrow").iter(BATCH):
        for row in table.to_pylist():
            digest.update(encoder.encode(row).encode())
    return digest.hexdigest()
