"""Read a dataset by the name a recipe gives: a local file, a local folder, or a dataset of the hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from datasets import Dataset, load_dataset, load_from_disk

from ..errors import UserError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read_split(name: str, split: str, config: str | None = None) -> Dataset:
    """Read one split of the dataset `name`.

    A file (.jsonl, .json, .parquet, .csv) is one split, whatever it is called; a folder holds a file for each
    split, or what `save_to_disk` wrote; anything else is looked up on the hub. `split` may carry a slice
    (`train[:100]`).

    Raises UserError for a file, folder or split that is not there, with what is; for one that cannot be read;
    for an unreachable hub.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _read_file(path, split)
    if path.is_dir():
        return _read_folder(path, split)
    if _looks_local(name, path):
        raise UserError(f"there is no file or folder {name!r}; {_nearby(path)}")
    try:
        return load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no local file or folder is called {name!r}, and the hub did not give it (config {config!r}, "
            f"split {split!r}): {_first_line(error)}. Without network, name a local file as "
            "dataset_name, or the folder of a published task as data_dir"
        ) from error


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
            f"{path} could not be read as {reader}: {_first_line(error.__cause__ or error)}; mend that row "
            "or name another file"
        ) from error


def _read_folder(path: Path, split: str) -> Dataset:
    saved = [marker for marker in ("dataset_dict.json", "state.json") if (path / marker).is_file()]
    try:
        if not saved:
            return load_dataset(str(path), split=split)
        found = load_from_disk(str(path))
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
    """Whether a name that does not exist was meant as a path: hub names are `name` or `owner/name`."""
    return path.suffix.lower() in READERS or name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1


def _nearby(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    near = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    hint = f"did you mean {folder / near[0]}? " if near else ""
    return f"{hint}{folder.resolve()} holds {listing(folder)}"


def listing(folder: Path, most: int = 8) -> str:
    """The first names of a folder, for a message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if entry.name[0] != ".")
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
