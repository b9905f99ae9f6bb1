"""Standard output and error of a process: safe to use, and dropped when they can no longer be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Stream:
    """A standard stream that keeps, as `lost`, the error of the last write that failed."""

    lost: OSError | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda: self._stream.flush())

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except OSError as error:
            self.lost = error
            raise


def settle_streams() -> None:
    """Make the standard streams of this process safe to use, however it was started.

    A closed descriptor becomes the null device, so that no file that is opened later gets its number. Output takes any
    text in any encoding.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, Stream(stream))


def lost_output(error: BaseException) -> OSError | None:
    """Return the failed write to standard output or error that caused an error; None if it has another cause."""
    for stream in (sys.stdout, sys.stderr):
        lost = getattr(stream, "lost", None)
        if lost is not None and lost in (error, error.__context__):
            return lost
    return None


def drop_pending_output() -> None:
    """Keep Python from writing to a lost stream at exit, which would print an error."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        if getattr(stream, "lost", None):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextmanager
def outlive_output() -> Iterator[None]:
    """Inside, work continues even if standard output or error can no longer be written: its reader or terminal is gone,
    or its disk is full. What is printed after that is dropped; a run's files say what it does.
    """
    output_before = sys.stdout
    errors_before = sys.stderr
    output = _Lasting(sys.stdout)
    errors = _Lasting(sys.stderr)
    sys.stdout = output
    sys.stderr = errors
    try:
        yield
    finally:
        output.flush()
        errors.flush()
        # Code inside may have put a stream of its own here, which stays.
        if sys.stdout is output:
            sys.stdout = output_before
        if sys.stderr is errors:
            sys.stderr = errors_before


class _Lasting(Stream):
    """A standard stream that never raises: after a failed write the null device replaces it."""

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (BlockingIOError, UnicodeError):
            pass  # a slow reader, or text that the encoding cannot represent
        except (OSError, ValueError):
            null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            try:
                os.dup2(null.fileno(), self._stream.fileno())  # also for processes that inherit it
            except (OSError, ValueError):
                self._stream = null
            with suppress(OSError, ValueError):
                self._stream.flush()  # what was lost is still in the buffer
