"""Standard output and error of a process: safe to use, and replaced by a log when they can no longer be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from .text import plain_text


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
    output_before = sys.stdout
    errors_before = sys.stderr
    errors = _Lasting("error", sys.stderr, log)
    output = _Lasting("output", sys.stdout, log, errors)
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
    """A standard stream that never raises: after a failed write the log replaces it.

    Args:
        name: of the stream, in a message.
        stream: the one that is written.
        log: as of `outlive_output`.
        notices: receives a message that names the log. If None, there is no message.
    """

    def __init__(self, name: str, stream: TextIO, log: Path | None, notices: Stream | None = None) -> None:
        super().__init__(stream)
        self._name = name
        self._log = log
        self._notices = notices

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (BlockingIOError, UnicodeError):
            pass  # a slow reader, or text that the encoding cannot represent
        except (OSError, ValueError) as error:
            self._replace(getattr(error, "strerror", None) or "it is closed")
            with suppress(OSError, ValueError):
                self._stream.flush()  # what was lost is still in the buffer

    def _replace(self, reason: str) -> None:
        """Replace the stream by the log, or by the null device if there is none or it cannot be written either."""
        log = self._log
        if log is not None and not log.parent.is_dir():
            return  # the run has no directory yet: the text waits in the buffer
        self._log = None  # a log that fails is not opened again
        target = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        note = f"Standard {self._name} cannot be written: {reason}. The run continues and prints"
        if log is not None:
            with suppress(OSError):
                # a pipe in its place would block without this option
                handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
                target = open(handle, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
                print(f"{note} here.", file=target, flush=True)
        try:
            os.dup2(target.fileno(), self._stream.fileno())  # also for processes that inherit it
        except (OSError, ValueError):
            self._stream = target
        if log is not None and self._notices is not None:
            # Not `sys.stderr`: rich sends that to standard output while it redraws a line.
            print(plain_text(f"{note} to {log}."), file=self._notices, flush=True)
