"""How large the values of a file are, before they are read: a few kilobytes can hold gigabytes.

Parquet writes a value that is repeated once, and compressed text can be a thousand times its file.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from .files import check_regular

_ALLOWED = 512_000_000  # bytes of values that any file may hold
_ALLOWED_RATIO = 50  # of a larger file's own size
_ROWS = 10_000  # read at once
_ROW_BYTES = 100  # of a row as an object of Python
_CHUNK = 1 << 20  # bytes of text
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open}


def check_size(path: Path) -> None:
    """Raise UserError for a Parquet or compressed file whose values are far larger than the file.

    Takes the memory of one part of the file. Files of other kinds are as large as their values, and are not read.

    Raises:
        UserError: it is a pipe, or the values have more than 512 MB and more than 50 times the size of the file.
        Exception: those of pyarrow, zlib and others for a damaged file.
    """
    check_regular(path)
    status = path.stat()
    allowed = max(_ALLOWED, _ALLOWED_RATIO * status.st_size)
    size = _size(path, allowed, status.st_ctime_ns)
    if size > allowed:
        raise UserError(
            f"{path} has {_megabytes(status.st_size)} and holds at least {_megabytes(size)} of values, more than the "
            f"{_megabytes(allowed)} that are read from such a file. Remove the values that are very long or repeated, "
            "or split the rows into several files."
        )


@lru_cache
def _size(path: Path, allowed: int, changed: int) -> int:
    """Return the bytes of a file's values, as far as `allowed`; `changed` is part of the key of the cache."""
    size = 0
    for part in _parts(path):
        size += part
        if size > allowed:
            break
    return size


def _megabytes(size: int) -> str:
    if size < 1e6:
        return f"{size / 1e3:,.1f} KB"
    return f"{size / 1e6:,.0f} MB"


def _parts(path: Path) -> Iterator[int]:
    """Yield the sizes in bytes of the parts of a file's values."""
    ending = path.suffix.lower()
    if ending == ".parquet":
        yield from _parquet_parts(path)
    elif ending == ".zip":
        with zipfile.ZipFile(path) as archive:
            yield from (member.file_size for member in archive.infolist())
    elif ending in _OPENERS:
        with _OPENERS[ending](path, "rb") as text:
            while chunk := text.read(_CHUNK):
                yield len(chunk)


def _parquet_parts(path: Path) -> Iterator[int]:
    """Yield the decoded sizes of batches of rows; repeated text stays encoded as it is read."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = [file.schema.column(number) for number in range(len(file.schema))]
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        # Before any page is read: each is uncompressed as a whole, and repeated numbers take no space in the file.
        pages = sum(group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns))
        rows = file.metadata.num_rows * _ROW_BYTES
    if max(pages, rows) > _ALLOWED:
        yield max(pages, rows)
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(batch_size=_ROWS):
            for column in batch.columns:
                yield _decoded_size(column)


def _decoded_size(array: Any) -> int:
    """Return the bytes of an array whose text is encoded as a dictionary, once it is decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return int(pc.sum(lengths.take(array.indices)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(map(_decoded_size, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _decoded_size(array.flatten())
    if pa.types.is_map(kind):
        return _decoded_size(array.keys) + _decoded_size(array.items)
    return int(array.nbytes)
