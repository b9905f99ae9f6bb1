"""The position of this process in a run, which the others read when a process is late. No torch.

All processes pass the same marks in the same order, so the others wait for the one that has passed the fewest. A mark
costs a microsecond; where there are several processes, a thread (`watch`) sends it to the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

SILENT = 30.0  # seconds without a heartbeat after which a process counts as stopped (`watch.BEAT` is the interval)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Position:
    """Where a process is in its work.

    Args:
        marks: how many it has passed; the same work has the same number on every process.
        step: the optimizer step, 0 before the first.
        doing: what it does, or did last.
        busy: it works by itself; else it may wait for the others.
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
_working: list[str] = []  # what this process does by itself now; async reward functions overlap


def here() -> Position:
    """Return the current position of this process."""
    return replace(_here, seen=time.time(), where=_where())


def mark(doing: str, *, busy: bool = False, step: int | None = None) -> None:
    """Pass a mark; `step`: where a new step begins."""
    global _here
    step = _here.step if step is None else step
    _here = Position(_here.marks + 1, step, doing, busy, time.time())


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Inside, this process works by itself and waits for no other. It passes a mark at each end.

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
    """Return the process that this one has waited for longer than `limit` seconds; None where there is none.

    A busy process waits for none. Of several that are behind, return the one furthest behind, then the lowest rank.
    Where none is behind, return one without a heartbeat for `SILENT` seconds.

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
