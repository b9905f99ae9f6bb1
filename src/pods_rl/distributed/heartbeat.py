"""Messages that processes publish to each other: their position in the run, and why it fails. No torch."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..errors import UserError
from ..text import plain_text

SILENT = 30.0  # seconds without a heartbeat after which a process counts as stopped (`watch.BEAT` is the interval)
# A broken collective raises many types, most often a plain RuntimeError with the library's name in its text.
_TRANSPORTS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "tcpstore", "c10d")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Position:
    """The position of a process in its work.

    Args:
        marks: the number it has passed; the same work has the same number on every process.
        step: the optimizer step, 0 before the first.
        doing: its current or last activity.
        busy: it works alone; if false, it may wait for the others.
        since: wall clock in seconds at its last mark.
        seen: wall clock in seconds of this heartbeat.
        where: the function that its main thread is in.
    """

    marks: int = 0
    step: int = 0
    doing: str = "loading"
    busy: bool = True
    since: float = 0.0
    seen: float = 0.0
    where: str = ""

    def describe(self) -> str:
        """
        >>> Position(7, 12, "reward 'format'").describe(), Position().describe()
        ("in reward 'format' of step 12", 'loading')
        """
        if self.marks == 0:
            return self.doing
        return f"in {self.doing}" + (f" of step {self.step}" if self.step else "")


_here = Position(since=time.time())
_working: list[str] = []  # what this process works on alone; async reward functions overlap


def here() -> Position:
    """Return the current position of this process."""
    return replace(_here, seen=time.time(), where=_where())


def mark(doing: str, *, busy: bool = False, step: int | None = None) -> None:
    """Pass a mark; `step`: given if a new step begins."""
    global _here
    step = _here.step if step is None else step
    _here = Position(_here.marks + 1, step, doing, busy, time.time())


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Inside, this process works alone and waits for no other. It passes a mark at each end.

    Such regions may overlap: the process may wait again when the last one ends. After an exception there is no second
    mark, so that the position names the region that failed.

    >>> with busy("generation"): here().busy
    True
    >>> here().busy, here().doing
    (False, 'generation')
    """
    _working.append(doing)
    mark(doing, busy=True)
    try:
        yield
    finally:
        _working.remove(doing)
    mark(_working[-1] if _working else doing, busy=bool(_working))


def _where() -> str:
    """The innermost function of the main thread, or of the user's code in it, as `name (file:line)`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = None
    while frame is not None:
        file = frame.f_code.co_filename
        text = f"{frame.f_code.co_name} ({os.path.basename(file)}:{frame.f_lineno})"
        innermost = innermost or text
        if not (file.startswith((_PACKAGE, sys.prefix, sys.base_prefix, "<")) or "site-packages" in file):
            return text
        frame = frame.f_back
    return innermost or ""


def overdue(own: Position, others: Mapping[int, Position], limit: float) -> int | None:
    """Return the process that this one has waited for longer than `limit` seconds, or None.

    A busy process does not wait. Of several that are behind, return the one furthest behind, then the lowest rank.
    If none is behind, return one without a heartbeat for `SILENT` seconds.

    Args:
        own: the position of this process.
        others: the last positions of the others, by rank.
        limit: seconds.

    >>> late = Position(3, 12, "reward 'slow'", since=100.0, seen=709.0)
    >>> waits = Position(4, 12, "reward 'slow'", busy=False, since=105.0, seen=709.0)
    >>> overdue(waits, {1: late, 2: waits}, 600.0), overdue(waits, {1: late}, 605.0), overdue(late, {0: waits}, 1.0)
    (1, None, None)
    """
    if own.busy or own.seen - own.since < limit:
        return None
    behind = [(position.marks, rank) for rank, position in others.items() if position.marks < own.marks]
    silent = [(position.seen, rank) for rank, position in others.items() if own.seen - position.seen > SILENT]
    return min(behind or silent, default=(None, None))[1]


@dataclass(frozen=True)
class Failure:
    """Why a run ends.

    Args:
        process: the process that failed.
        reason: one line, which `status.json` keeps.
        details: a traceback to print below it, or nothing.
        code: the exit code of every process.
        state: the final state of the run.
        host: of a killed process whose launcher can report how it ended; else empty.
    """

    process: int
    reason: str
    details: str = ""
    code: int = 1
    state: str = "failed"
    host: str = ""


def of_error(error: BaseException, process: int) -> Failure:
    """Return the failure of a run that an exception in one process causes.

    >>> of_error(UserError("No data.\\nPut some there."), 1).reason, of_error(UserError(""), 1).code
    ('process 1: No data. Put some there.', 2)
    """
    if isinstance(error, KeyboardInterrupt):
        return Failure(process, str(error) or "interrupted", code=getattr(error, "code", 130), state="stopped")
    message = plain_text(error).replace("\n", " ").strip()
    if isinstance(error, UserError):
        return Failure(process, f"process {process}: {message}", code=2)
    kind = type(error).__name__
    details = plain_text("".join(traceback.format_exception(error)))
    return Failure(process, f"process {process}: {kind}: {message}".removesuffix(": "), details)


def of_stall(process: int, late: Position, waiting: int, own: Position, limit: float) -> Failure:
    """Return the failure of `process`, last seen at `late`, that process `waiting` waits for at `own`."""
    at = f", at {plain_text(late.where)}" if late.where else ""
    silent = own.seen - late.seen
    quiet = f", without a heartbeat for {silent:.0f} s" if silent > SILENT else ""
    return Failure(
        process,
        f"process {process} has been {late.describe()} for {own.seen - late.since:.0f} s{at}{quiet}; process {waiting} "
        f"waited {own.seen - own.since:.0f} s for it, longer than ddp_timeout = {limit:g} s. Set a higher "
        "ddp_timeout in the recipe if work may take that long",
    )


def of_broken_collective(error: BaseException, process: int, own: Position, others: Mapping[int, Position]) -> Failure:
    """Return the failure of a collective that broke for no known reason; lists the position of each process."""
    message = plain_text(error).split("\n")[0]
    positions = {process: own, **others}
    lines = [f"process {k}: {at.describe()}, at {plain_text(at.where)}\n" for k, at in sorted(positions.items())]
    return Failure(process, f"process {process} lost contact {own.describe()}: {message}", "".join(lines))


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether an exception may only mean that another process has ended.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_a_collective(ValueError("reward 'format' gave None"))
    False
    """
    text = str(error).lower()
    of_transport = isinstance(error, RuntimeError) and any(word in text for word in _TRANSPORTS)
    return of_transport or type(error).__module__.startswith("torch.distributed")
