"""The standard streams of a process: safe to use from the start, and a run that outlives them."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..text import plain_text


class Stream(io.TextIOWrapper):
    """Standard output or error that remembers, as `lost`, the error of the last write that failed."""

    lost: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.lost = error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.lost = error
            raise


def settle_streams() -> None:
    """Make the standard streams of this process safe to use, however it was started.

    A descriptor that was closed is the null device, so that no file that is opened later takes its number. Output takes
    any text in any encoding. A width that is not a sensible number is dropped from the environment.
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
            how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            try:
                settled = Stream(stream.buffer, stream.encoding, "backslashreplace", **how)
            except OSError:  # its descriptor has come to name a pipe since, which cannot seek
                buffer = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115
                settled = Stream(buffer, stream.encoding, "backslashreplace", **how)
            setattr(sys, name, settled)
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(name, "1")):
            del os.environ[name]


def lost_output(error: BaseException) -> OSError | None:
    """The error of standard output or error that raised this one; None where the cause is another."""
    for stream in (sys.stdout, sys.stderr):
        lost = getattr(stream, "lost", None)
        if lost is not None and lost in (error, error.__context__):
            return lost
    return None


def drop_pending_output() -> None:
    """Have nothing left that Python would try to write, and complain about, at exit."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        if getattr(stream, "lost", None):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextmanager
def outlive_output(log: Path | None) -> Iterator[None]:
    """Within, work goes on when standard output or error can no longer be written: its reader or terminal is gone, the
    disk is full, or it was closed from the start. What is printed then goes to the end of `log`, which says why.

    Args:
        log: a file, opened when it is needed; None: drop the text.
    """
    before = sys.stdout, sys.stderr
    ours = _Lasting("stdout", log), _Lasting("stderr", log)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for name, stream, former in zip(("stdout", "stderr"), ours, before, strict=True):
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, former)


class _Lasting:
    """A standard stream that no failure to write gets out of."""

    def __init__(self, name: str, log: Path | None) -> None:
        self._name, self._log, self._losses = name, log, 0
        self._stream = getattr(sys, name)
        if getattr(sys, f"__{name}__") is None and getattr(self._stream, "name", os.devnull) == os.devnull:
            self._stream = io.StringIO()
            self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    @property
    def closed(self) -> bool:
        return bool(getattr(self._stream, "closed", False))

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(lambda: self._stream.flush())

    def isatty(self) -> bool:
        return not self.closed and bool(self._stream.isatty())

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (BlockingIOError, UnicodeError):
            pass  # a reader that is slow for now; text that the encoding does not have
        except (OSError, ValueError) as error:
            kept = not self.closed and not getattr(self._stream, "write_through", False)
            self._lose(error)
            with suppress(OSError, ValueError):
                self._stream.flush() if kept else step()  # a buffer still holds what could not be written

    def _lose(self, error: Exception) -> None:
        """Put the log in the stream's place; the null device where that cannot be written either."""
        self._losses += 1
        target = _opened(self._log if self._losses == 1 else None)
        why = getattr(error, "strerror", None) or "it is closed"
        note = f"Standard {'output' if self._name == 'stdout' else 'error'} cannot be written: {why}. The run goes on"
        with suppress(OSError):
            target.write(f"{note}; what it prints follows here.\n")
            target.flush()
        try:
            os.dup2(target.fileno(), self._stream.fileno())  # for processes that inherit it too
        except (OSError, ValueError, AttributeError):
            self._stream = target
        if self._name == "stdout" and self._losses == 1 and self._log:
            print(plain_text(f"{note}; what it prints goes to {self._log}."), file=sys.stderr, flush=True)


def _opened(log: Path | None) -> io.TextIOWrapper:
    with suppress(OSError):
        if log:
            return log.open("a", encoding="utf-8", errors="backslashreplace")
    return open(os.devnull, "w", encoding="utf-8")
