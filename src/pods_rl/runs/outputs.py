"""The files that commands write: checked before the work, and replaced only once they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import UserError
from .files import encoded, replacing


def check_output(
    path: Path,
    option: str,
    *,
    inputs: Sequence[Path] = (),
    ours: Callable[[Path], bool] | None = None,
    force: bool | None = False,
) -> None:
    """Raise UserError, before any work, if a command may not write its result to a file.

    Devices and pipes such as /dev/stdout are written in place.

    Args:
        path: the file.
        option: names the file in messages.
        inputs: the files and directories that the command reads. They are never written, even with `force`.
        ours: whether an existing file is an earlier result of the command, so that it may be replaced.
        force: replace an existing file that is not ours. None: the command has no such option.
    """
    target = Path(os.path.realpath(path))
    try:
        for given in inputs:
            if given.is_dir() and target.parent.is_dir() and target.parent.samefile(given):
                raise UserError(
                    f"{option} {path} is in the directory {given}, which is read: choose another directory."
                )
            if given.is_file() and target.is_file() and target.samefile(given):
                raise UserError(f"{option} {path} is the input {given}: choose another file.")
        if target.is_dir():
            raise UserError(f"{option} {path} is a directory: give a file.")
        if not target.parent.is_dir():
            raise UserError(f"{option} {path}: its directory does not exist. Create it, or choose another.")
        if not os.access(target.parent if not target.exists() else target, os.W_OK):
            raise UserError(f"{option} {path} cannot be written to: permission denied. Choose another file.")
        if target.is_file() and not force and not (ours is not None and ours(target)):
            how = "Choose another" if force is None else "Replace it with --force, or choose another"
            raise UserError(f"{option} {path} exists, and this command did not write it. {how}.")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{option} {path} cannot be used: {getattr(error, 'strerror', None) or error}.") from error


def begins_with(head: str) -> Callable[[Path], bool]:
    """Return whether a file begins with a text, as those of a command do; for `check_output`."""

    def ours(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(head.encode())) == head.encode()

    return ours


@contextmanager
def writing(path: Path, option: str) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` once it is complete; raise UserError if the disk is full or refuses it."""
    try:
        with replacing(path, follow=True) as file:
            yield file
    except OSError as error:
        raise UserError(f"{option} {path} was not written: {error.strerror or error}. Choose another file.") from error


def write_output(path: Path, option: str, text: str) -> None:
    """Write text as `writing` does."""
    with writing(path, option) as file:
        file.write(encoded(text))
