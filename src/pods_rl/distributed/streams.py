"""The standard streams of a process: made safe to use, and replaced by a log when they can no longer be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ..text import plain_text


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
def outlive_output(log: Path | None) -> Iterator[None]:
    """Inside, work continues even if standard output or error can no longer be written: its reader or terminal is gone,
    or its disk is full. Text is then appended to `log`, with the reason.

    Args:
        log: a file, opened when it is needed. If None, the text is dropped.
    """
    before = sys.stdout, sys.stderr
    errors = _Lasting("error", sys.stderr, log)
    ours = _Lasting("output", sys.stdout, log, errors), errors
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for name, stream, former in zip(("stdout", "stderr"), ours, before, strict=True):
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, former)


class _Lasting(Stream):
    """A standard stream that never raises: after a failed write the log replaces it, and `other` names the log."""

    def __init__(self, name: str, stream: TextIO, log: Path | None, other: Stream | None = None) -> None:
        super().__init__(stream)
        self._name, self._log, self._other = name, log, other

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (BlockingIOError, UnicodeError):
            pass  # a slow reader, or text that the encoding cannot represent
        except (OSError, ValueError) as error:
            self._replace(getattr(error, "strerror", None) or "it is closed")
            with suppress(OSError, ValueError):
                self._stream.flush()  # what was lost is still in the buffer

    def _replace(self, why: str) -> None:
        """Replace the stream by the log, or by the null device if there is none or it cannot be written either."""
        if self._log and not self._log.parent.is_dir():
            return  # the run has no directory yet: the text waits in the buffer
        log, self._log = self._log, None
        target = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        note = f"Standard {self._name} cannot be written: {why}. The run continues and prints"
        if log:
            with suppress(OSError):
                target = log.open("a", encoding="utf-8", errors="backslashreplace")
                print(f"{note} here.", file=target, flush=True)
        try:
            os.dup2(target.fileno(), self._stream.fileno())  # also for processes that inherit it
        except (OSError, ValueError):
            self._stream = target
        if log and self._other:  # not `sys.stderr`: rich sends that to standard output while it redraws a line
            print(plain_text(f"{note} to {log}."), file=self._other, flush=True)
