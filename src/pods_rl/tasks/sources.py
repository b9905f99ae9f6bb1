"""Where the rows of a task are read: a file, a folder, or a data set of the hub; and how one split becomes two."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    Dataset,
    ReadInstruction,
    config,
    get_dataset_split_names,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.fingerprint import Hasher

from ..errors import UserError, first_line, hub_problem
from ..runs.files import check_regular
from ..runs.sources import file_hashes
from ..tables import BATCH, rows_of
from ..text import suggest
from . import files
from .files import ROW, parse_row

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_MARKERS = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` wrote
_HELD_OUT_BELOW = (2**256 // 10).to_bytes(32, "big")  # of the hashes of questions: one in ten
_MOST_HELD_OUT = 1000
_ENCODER = json.JSONEncoder(sort_keys=True, default=str)


@dataclass(frozen=True)
class DataSource:
    """One split of a dataset, as a recipe names it.

    A file (.jsonl, .json, .parquet, .csv) is one split, whatever its name; a folder holds a file for each split, or
    what `save_to_disk` wrote; any other name is looked up on the hub. `split` may carry a slice (`train[:100]`).
    """

    name: str
    split: str
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.split})"

    @property
    def path(self) -> Path:
        """The file or folder, which exists unless the name is that of the hub."""
        return Path(self.name).expanduser()

    def read(self) -> Dataset:
        """Read the rows; those of JSON and CSV files are text in the column `files.ROW`."""
        path = self.path
        is_path = self.name.startswith((".", "~")) or path.is_absolute() or self.name.count("/") > 1
        # names of the hub are `name` or `owner/name`
        if not path.exists() and (is_path or path.suffix.lower() in READERS):
            siblings = os.listdir(path.parent) if path.parent.is_dir() else []
            near = suggest(path.name, siblings)
            raise UserError(f"there is no file or folder {self.name!r} (looked in {Path.cwd()}).{near}")
        check_regular(path)
        if path.is_file() and path.suffix.lower() not in READERS:
            kind = path.suffix or "file without an ending"
            raise UserError(f"{path} is a {kind}; expected one of {', '.join(READERS)}")
        try:
            rows = self._load(path)
        except UserError:
            raise
        except Exception as error:  # each reader raises its own, pyarrow's and the system's
            if isinstance(error.__cause__, UserError):  # of our reader, raised inside the library's
                raise error.__cause__ from None
            problem = hub_problem(error)
            if problem and not path.exists():
                raise UserError(
                    f"{self._description()} is not in the local cache, and the hub cannot be reached ({problem}). "
                    "Check the network. Without it, put the files of a published task in a folder and set data_dir "
                    "(--data_dir FOLDER), name a local file as dataset_name, or copy the cache (HF_HOME) of a machine "
                    "that has read the data"
                ) from error
            reason = first_line(error.__cause__ or error)
            raise UserError(
                f"{self._description()} gives no split {self.split!r}: {reason} Fix it, or name another file"
            ) from error
        if len(rows) == 0:
            raise UserError(f"{self} has no rows; expected at least one")
        return rows

    def _description(self) -> str:
        """Return what the source is, for a message."""
        path = self.path
        if path.is_dir():
            return f"the folder {path} (it holds {listing(path)})"
        if path.is_file():
            return f"the file {path}"
        return f"the data set {self.name} of the hub"

    def _load(self, path: Path) -> Dataset:
        if not path.exists():
            return load_dataset(self.name, self.config, split=self.split)
        if path.is_file() and path.suffix.lower() in files.ENDINGS:
            return _slice(files.read_files([path]), self.split)
        contents = _contents_hash(path)
        # `datasets` knows a file by its path and its time of change, which another file may have
        cache = str(Path(config.HF_DATASETS_CACHE) / "pods-rl" / contents)
        if path.is_file():
            data_files = {_without_slice(self.split): str(path)}
            reader = READERS[path.suffix.lower()]
            rows = load_dataset(reader, data_files=data_files, split=self.split, batch_size=BATCH, cache_dir=cache)
        elif _is_saved(path):
            saved = load_from_disk(str(path))
            if not isinstance(saved, Dataset):  # a dictionary of splits
                saved = saved[_without_slice(self.split)]
            rows = _slice(saved, self.split)
        else:
            text_files = self._text_files(path)
            if text_files:
                rows = _slice(files.read_files(text_files), self.split)
            else:
                rows = load_dataset(str(path), self.config, split=self.split, cache_dir=cache)
        rows._fingerprint = Hasher.hash((contents, self.split, self.config))
        return rows

    def _text_files(self, folder: Path) -> list[Path]:
        """Return the files of a split of a folder, if all of them are JSON or CSV files with commas."""
        # `datasets` decides which files belong to a split, and its own readers read all other folders
        builder = load_dataset_builder(str(folder), self.config)
        if getattr(builder.config, "sep", ",") != "," or getattr(builder.config, "field", None):
            return []
        files_of_split = builder.config.data_files or {}
        paths = [Path(file) for file in files_of_split.get(_without_slice(self.split), ())]
        endings = {path.suffix.lower() for path in paths}
        return paths if len(endings) == 1 and endings <= set(files.ENDINGS) else []

    def splits(self) -> list[str]:
        """Return the names of the splits of this data set; empty if they are not known, or if it has no names."""
        path = self.path
        if path.is_file():
            return []
        try:
            if _is_saved(path):
                saved = load_from_disk(str(path))
                return [] if isinstance(saved, Dataset) else [str(name) for name in saved]
            if path.is_dir():
                for file in sorted(path.rglob("*.*")):
                    check_regular(file)  # `datasets` opens each to look
            return [str(name) for name in get_dataset_split_names(self.name, self.config)]
        except UserError:
            raise
        except Exception:  # reading the data raises the error that says what to do
            return []

    @property
    def is_one_split(self) -> bool:
        """Whether the data are one split without a name: a file, or a `Dataset` that was saved alone."""
        return self.path.is_file() or (self.path / "state.json").is_file()


def _contents_hash(path: Path) -> str:
    """Return a hash of a file, or of the names and contents of all files below a folder."""
    if path.is_file():
        return file_hashes({"": path})[""]
    found: dict[str, Path] = {}
    visited: set[str] = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        found |= {os.path.relpath(os.path.join(folder, name), path): Path(folder, name) for name in names}
    for file in found.values():
        check_regular(file)
    return hashlib.sha256(repr(sorted(file_hashes(found).items())).encode()).hexdigest()


def column_names(rows: Dataset, *, first: int | None = None) -> list[str]:
    """Return the names of the columns of a source's rows, of the `first` rows if given, in their order."""
    if ROW not in rows.column_names:
        return list(rows.column_names)
    return list(dict.fromkeys(name for row in read_rows(first_rows(rows, first)) for name in row))


def read_rows(rows: Dataset) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source as mappings."""
    for batch in rows.iter(BATCH):
        if ROW in batch:
            yield from map(parse_row, batch[ROW])
        else:
            yield from rows_of(batch)


def parsed(batch: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
    """Return a batch of a source's rows as `column_values` reads it: rows of text are parsed, once for all columns."""
    return {ROW: [parse_row(text) for text in batch[ROW]]} if ROW in batch else batch


def column_values(batch: Mapping[str, list[Any]], column: str, dtype: str | None = None) -> list[object]:
    """Return the values of one column in a batch that `parsed` returned."""
    if ROW in batch:
        return [row.get(column) for row in batch[ROW]]
    values: list[object] = list(batch[column])
    if dtype not in ("float16", "float32"):  # in the file; these keep their own shortest text
        return values
    as_stored = np.dtype(dtype).type
    for row, value in enumerate(values):
        if value is not None:
            values[row] = as_stored(value)
    return values


def column_of(rows: Dataset, column: str) -> Iterator[Any]:
    """Yield the values of a column, with the memory of a batch."""
    for batch in rows.iter(BATCH):
        yield from batch[column]


def first_rows(rows: Dataset, size: int | None) -> Dataset:
    """Return the first rows of a split; all of them without a size."""
    return rows if size is None or size >= len(rows) else rows.select(range(size))


def hold_out(rows: Dataset, questions: Sequence[bytes], source: DataSource) -> tuple[Dataset, Dataset]:
    """Cut rows in two splits, of about nine and one in ten of the distinct questions: the training and the test rows.

    A question is in the test split if its own hash says so, whatever the other rows, the seed and the prompt's form
    are. So no row that was trained is tested later, even if rows are added in between. At least one question is in
    each split, and at most 1,000 are in the test split. `questions` has the `question_hash` of each row.
    """
    distinct = sorted(set(questions))
    if len(distinct) < 2:
        raise UserError(
            f"{source} has one distinct question, so there is nothing to test on: name test rows as dataset_test_name"
        )
    count = bisect_left(distinct, _HELD_OUT_BELOW)
    count = min(max(1, count), _MOST_HELD_OUT, len(distinct) - 1)
    held_out = set(distinct[:count])
    train = [row for row, question in enumerate(questions) if question not in held_out]
    test = [row for row, question in enumerate(questions) if question in held_out]
    return rows.select(train), rows.select(test)


def question_hash(question: object) -> bytes:
    """Return a hash of a question as the data have it, which decides the split of its row."""
    if isinstance(question, str):
        # spaces and capitals do not count, so that a question written twice is in one split
        question = " ".join(question.split()).casefold()
    return hashlib.sha256(_ENCODER.encode(question).encode()).digest()


def _slice(rows: Dataset, split: str) -> Dataset:
    """Return the rows of a split of a file, such as `train[:80%]` or `train[:10]+train[20:30]`."""
    all_rows = range(len(rows))
    parts = ReadInstruction.from_spec(split).to_absolute({_without_slice(split): len(rows)})
    ranges = [all_rows[part.from_ : part.to] for part in parts]
    if ranges == [all_rows]:
        return rows
    return rows.select([row for part in ranges for row in part])


def _without_slice(split: str) -> str:
    """Return the name of a split without its slice, as `train` of `train[:80%]` or of `[:5]`."""
    return re.split(r"[\[+]", split)[0] or "train"


def _is_saved(path: Path) -> bool:
    return any((path / marker).is_file() for marker in _MARKERS)


def local_folder(data_dir: str) -> Path:
    """Return the folder that a recipe names as `data_dir`; raise UserError if it does not exist."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"data_dir = {data_dir}: there is no such folder (looked in {Path.cwd()})")
    return folder


def listing(folder: Path) -> str:
    """Return the first names in a folder, for a message."""
    return ", ".join(sorted(os.listdir(folder))[:8]) or "nothing"
