"""Read the rows of a task from a local file, a local folder, or a data set of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, config, load_dataset, load_from_disk
from datasets.fingerprint import Hasher

from ..errors import UserError
from ..text import suggest

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_FEW_ROWS = 20_000  # held in memory


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
    def is_file(self) -> bool:
        """Whether this is one local file, and so one split."""
        return Path(self.name).expanduser().is_file()

    def read(self) -> Dataset:
        """Read the rows.

        Raises UserError for a file, folder or split that is missing, naming what exists; for one that cannot be
        read or has no rows; for an unreachable hub.
        """
        path = Path(self.name).expanduser()
        if path.is_file():
            rows = _read_file(path, self.split)
        elif path.is_dir():
            rows = _read_folder(path, self.split)
        elif _looks_local(self.name, path):
            near = suggest(path.name, [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else [])
            raise UserError(f"there is no file or folder {self.name!r} (looked in {Path.cwd()}).{near}")
        else:
            rows = self._read_hub()
        if len(rows) == 0:
            raise UserError(f"{self} has no rows; expected at least one")
        return rows

    def _read_hub(self) -> Dataset:
        try:
            return load_dataset(self.name, self.config, split=self.split)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"no local file or folder is called {self.name!r}, and reading it from the hub failed (config "
                f"{self.config!r}, split {self.split!r}): {_first_line(error)}. Without network, name a local file as "
                "dataset_name, or the folder of a published task as data_dir"
            ) from error


def mapped(rows: Dataset, change: Callable[..., dict[str, list[Any]]], *of: object) -> Dataset:
    """Return the data set that `change` makes of batches of rows, in memory in proportion to a batch.

    Args:
        rows: many of them go into a file of the datasets cache, which is read instead the next time.
        change: takes a batch (column -> values) and the numbers of its rows, and returns the new columns.
        of: everything that `change` depends on.
    """
    few = len(rows) <= _FEW_ROWS
    mark = Hasher.hash((rows._fingerprint, *of))
    file = None if few else str(Path(config.HF_DATASETS_CACHE) / f"pods-rl-{mark}.arrow")
    # `map` gives a new column the type of an old one with its name
    names = {f"given {name}": name for name in rows.column_names}
    return rows.rename_columns({name: given for given, name in names.items()}).map(
        lambda batch, numbers: change({name: batch[given] for given, name in names.items()}, numbers),
        with_indices=True,
        batched=True,
        remove_columns=list(names),
        keep_in_memory=few,
        cache_file_name=file,
        new_fingerprint=mark,
    )


def local_folder(data_dir: str) -> Path:
    """The folder that a recipe names as `data_dir`; raise UserError if it does not exist."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"data_dir = {data_dir}: there is no such folder (looked in {Path.cwd()})")
    return folder


def find_split(folder: Path, inner: tuple[str, ...], split: str) -> DataSource | None:
    """The file of a split (`train.jsonl`, `test.parquet`, ...): in one of the inner folders, else in the folder itself.

    `split` may have a slice. Returns None if there is no such file.
    """
    stem = split.partition("[")[0]
    for place in (*(folder / name for name in inner), folder):
        for ending in READERS:
            if (place / f"{stem}{ending}").is_file():
                return DataSource(str(place / f"{stem}{ending}"), split)
    return None


def listing(folder: Path) -> str:
    """Return the first names in a folder, for a message."""
    return ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"


def _read_file(path: Path, split: str) -> Dataset:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is a {path.suffix or 'file without an ending'}; expected one of {', '.join(READERS)}")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; expected at least one row")
    bare = re.split(r"[\[+]", split)[0] or "train"
    try:
        return load_dataset(reader, data_files={bare: str(path)}, split=split)
    except Exception as error:  # the reader raises its own, pyarrow's and the system's
        raise UserError(
            f"{path} could not be read as {reader}: {_first_line(error.__cause__ or error)}; fix that row or name "
            "another file"
        ) from error


def _read_folder(path: Path, split: str) -> Dataset:
    saved = any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    try:
        found = load_from_disk(str(path)) if saved else load_dataset(str(path), split=split)
    except Exception as error:  # as for a file
        raise UserError(
            f"the folder {path} gives no split {split!r}: {_first_line(error.__cause__ or error)}. It holds "
            f"{listing(path)}; name one file of it instead"
        ) from error
    if isinstance(found, Dataset):
        return found
    if split not in found:
        raise UserError(f"the folder {path} has no split {split!r}; it has {', '.join(found)}")
    return found[split]


def _looks_local(name: str, path: Path) -> bool:
    """Return whether a missing name must be a path: hub names are `name` or `owner/name`."""
    return path.suffix.lower() in READERS or name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
