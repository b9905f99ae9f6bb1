"""The files of runs and of commands: names, reading, atomic writing, and checks of a command's output."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from ..text import change_text, utf8_text

CONFIG = "config.yaml"
EXPERIMENT = "experiment.yaml"  # above the runs of `pods compare`
ENVIRONMENT = "environment.json"
STATUS = "status.json"
METRICS = "metrics.jsonl"
EVALS = "evals.jsonl"
LOG = "log.txt"
RESULTS = "results.jsonl"  # of `pods eval`
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
EVALUATIONS = "evaluations"
TRACKING = "tracking"
# Disk full, quota exceeded, file too large, read-only disk. Not every system has each.
_FULL = tuple(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS") if hasattr(errno, name))
_SAFETENSORS_ERROR = re.compile(r"os error (\d+)")
_TORCH_ERROR = re.compile(r"inline_container|PytorchStreamWriter|iostream error")


def check_regular(path: Path) -> None:
    """Raise UserError for a pipe, a device or a socket: opening one may block forever. A missing file is not one."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe or a device: expected a file. Remove it, or name another.")


def read_jsonl(path: Path, skipped: list[int] | None = None, tail: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; skip a torn line, or one of another type.

    A file that is unreadable counts as one skipped line. A missing one, or one that is not a regular file, counts as
    empty.

    Args:
        path: the file.
        skipped: receives the numbers of the skipped lines, from 1, without an unfinished last line: it may still be
            written.
        tail: if above 0, only the last bytes are read, this many.
    """
    if not path.is_file():  # opening a pipe would block
        return
    try:
        with path.open("rb") as file:
            if tail:
                file.seek(max(0, path.stat().st_size - tail))
            lines = file.read().split(b"\n")
    except OSError:
        if skipped is not None:
            skipped.append(1)
        return
    for number, line in enumerate(lines, start=1):
        row = None
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
        is_last = number == len(lines)
        if isinstance(row, dict):
            yield row
        elif skipped is not None and line.strip() and not is_last:
            skipped.append(number)


def last_row(path: Path) -> dict[str, Any]:
    """Return the last object of a JSONL file that may still grow; an empty one if its last 64 KiB hold none."""
    rows = list(read_jsonl(path, tail=1 << 16))  # some dozens of lines
    return rows[-1] if rows else {}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; an empty one if it is missing, unreadable or torn."""
    from ..yaml_files import YAMLError, parse_value

    try:
        if not path.is_file():  # opening a pipe would block
            return {}
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else parse_value(text)
    except (OSError, ValueError, RecursionError, YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def finite_number(value: Any, otherwise: float = 0.0) -> float:
    """Return a finite number unchanged, and ``otherwise`` for any other value in a damaged file.

    >>> finite_number(3), finite_number([1]), finite_number(float("nan")), finite_number("7", -1.0)
    (3.0, 0.0, 0.0, -1.0)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return otherwise
    with suppress(OverflowError):  # an integer beyond all floats
        if math.isfinite(value):
            return float(value)
    return otherwise


def step_of(path: Path) -> int:
    """Return the number at the end of a name, before its suffix; -1 if there is none."""
    match = re.search(r"-(\d+)(?:\.\w+)?$", path.name)
    return int(match[1]) if match else -1


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new. A link is replaced, not its target."""
    data = encoded(content) if isinstance(content, str) else content
    with open_replacement(path) as file:
        file.write(data)


def encoded(text: str) -> bytes:
    """Return text as UTF-8, with a lone surrogate as an escape that JSON and YAML read back."""
    return text.encode("utf-8", "backslashreplace")


@contextmanager
def open_replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces another once it is complete and on disk."""
    part = path.with_name(f".{os.getpid()}-{threading.get_ident()}.part")  # short: `path` may have the longest name
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file to append or write, as bytes or as text with characters escaped that UTF-8 cannot hold.

    Raises OSError for a link, whose target may belong to somebody else, and for a pipe, which may block.
    """
    text_options: dict[str, Any] = {}
    if "b" not in mode:
        text_options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
    return open(path, mode, opener=_open_no_link, **text_options)


def _open_no_link(name: str, flags: int) -> int:
    options = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has none
    handle = os.open(name, flags | options, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return handle


def write_parquet(target: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write a table atomically, and make its folder; escape characters that UTF-8 cannot hold."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(change_text(columns, utf8_text))
    with open_replacement(target) as file:  # a handle, since pyarrow rejects paths that are not UTF-8
        pq.write_table(table, file, compression="zstd")
    return target


def to_json(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """Return strict JSON of any logged value: numpy and torch scalars unwrapped, NaN and infinity as null.

    ``ascii_only`` escapes all other characters, for text that a terminal may show.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)})
    '{"loss": null, "steps": [1, 2]}'
    """
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    if ascii_only:
        text = text.replace("\x7f", "\\u007f")  # a control character, although it is ASCII
    return text


def plain(value: Any) -> Any:
    """Return any value as data that JSON and YAML hold: containers, text, finite numbers, None; text for all else.

    >>> plain({"seeds": {2, 1}, "rate": float("inf"), "folder": Path("a"), 3: (True,)})
    {'seeds': [1, 2], 'rate': None, 'folder': 'a', '3': [True]}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)  # in one order in every process
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, type):  # of numpy and torch
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return str(value)  # of text, without the class of a user, which YAML refuses


def write_failure(error: BaseException) -> str | None:
    """Return why a file could not be written, if the disk caused an error; None otherwise.

    >>> write_failure(OSError(28, "No space left on device"))
    'No space left on device'
    >>> write_failure(FileNotFoundError(2, "No such file or directory")) is None
    True
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause.strerror or str(cause)
        # safetensors and torch.save raise errors of their own
        number_in_text = _SAFETENSORS_ERROR.search(str(cause))
        if number_in_text and int(number_in_text[1]) in _FULL:
            return str(cause).splitlines()[0]
        if isinstance(cause, RuntimeError) and _TORCH_ERROR.search(str(cause)):
            return "a file could not be written completely"
        cause = cause.__cause__ or cause.__context__
    return None


def check_output(
    path: Path,
    option: str,
    *,
    inputs: Sequence[Path] = (),
    ours: Callable[[Path], bool] = lambda path: False,
    force: bool = False,
) -> None:
    """Raise UserError, before any work, if a command may not write its result to a file.

    Args:
        path: the file. A pipe or a device is refused.
        option: names the file in messages.
        inputs: the files that the command reads. They are never written, even with `force`.
        ours: whether an existing file is an earlier result of the command, so that it may be replaced.
        force: replace an existing file that is not ours.
    """
    try:
        target = Path(os.path.realpath(path))  # `write_output` replaces the target of a link
        check_regular(target)
        if target.exists() and any(read.is_file() and target.samefile(read) for read in inputs):
            raise UserError(f"{option} {path} is the input: choose another file.")
        if target.is_dir():
            raise UserError(f"{option} {path} is a directory: give a file.")
        if not target.parent.is_dir():
            raise UserError(f"{option} {path}: its directory does not exist. Create it, or choose another.")
        to_change = target if target.exists() else target.parent
        if not os.access(to_change, os.W_OK):
            raise UserError(f"{option} {path} cannot be written to: permission denied. Choose another file.")
        if target.is_file() and not force and not ours(target):
            raise UserError(
                f"{option} {path} exists, and this command did not write it. Replace it with --force, or choose "
                "another."
            )
    except OSError as error:
        raise UserError(f"{option} {path} cannot be used: {error.strerror or error}.") from error


def begins_with(path: Path, head: str) -> bool:
    """Return whether a file begins with a text, as those of a command do."""
    expected = head.encode()
    with path.open("rb") as file:
        return file.read(len(expected)) == expected


def write_output(path: Path, option: str, text: str) -> None:
    """Write text to a file that it replaces once it is complete; of a link, its target.

    Raises UserError if the disk is full or refuses it.
    """
    try:
        write_atomic(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise UserError(f"{option} {path} was not written: {error.strerror or error}. Choose another file.") from error
