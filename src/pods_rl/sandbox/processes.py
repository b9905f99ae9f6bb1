"""Start and end the processes of a worker, and the messages between it and its pool.

A worker is a leader that only forks the working child. The leader adopts orphans of the reward's processes,
so that all can be found and killed. Replies are numbered.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import psutil

from ..distributed.signals import SIGNALS

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of Linux's prctl
_HANDLED_BY_TRAINER = [number for number in SIGNALS if number != signal.SIGTERM]
_KILL_SECONDS = 10.0  # a killed process can take this long to end while it waits for a disk


class Reply(NamedTuple):
    """A worker's reply.

    `kind` is "gave" (`value` is the result), "raised" (`value` is the reason, as text), "refused" (a UserError's text),
    or the failure: "timeout", "crash" (the process ended) or "garbled" (something else wrote into the pipe).
    """

    kind: str
    value: Any = None

    @property
    def lost(self) -> bool:
        return self.kind in ("timeout", "crash", "garbled")


def frame(number: int, value: Any) -> bytes:
    """Return a line of JSON with a value and the number of its request. Arrays become lists, other objects text."""
    return json.dumps([number, value], default=_as_json).encode() + b"\n"


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unframe(line: bytes, number: int) -> Reply:
    """Return the reply in a line: "crash" if it is empty, "garbled" if it does not answer this request.

    >>> unframe(frame(7, Reply("gave", 0.5)), 7)
    Reply(kind='gave', value=0.5)
    >>> unframe(b"0.5", 7).kind, unframe(frame(6, Reply("gave", 0.5)), 7).kind, unframe(b"", 7).kind
    ('garbled', 'garbled', 'crash')
    """
    if not line:
        return Reply("crash")
    try:
        received, (kind, value) = json.loads(line)  # data of a child is never unpickled
    except (ValueError, TypeError):
        return Reply("garbled")
    return Reply(kind, value) if type(received) is int and received == number else Reply("garbled")


def send(descriptor: int, data: bytes) -> None:
    """Write all bytes."""
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def signals_held() -> Iterator[None]:
    """Inside, signals that ask a run to end wait; a process that starts here holds them until `outlive_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_BY_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals() -> None:
    """Ignore the signals that ask a run to end, which reach all its processes: the trainer ends this one.

    A handler does this, because programs started by a reward would inherit ignored signals.
    """
    for number in _HANDLED_BY_TRAINER:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_BY_TRAINER)


def fork(work: Callable[[], object]) -> int:
    """Call `work` in a child of this process; return its process id. On Linux it does not outlive this process."""
    flush()  # otherwise both would print the buffer
    parent = os.getpid()
    with signals_held():
        if child := os.fork():
            return child
        error: BaseException | None = None
        try:
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            outlive_signals()
            _prctl(_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                work()
        except BaseException as raised:
            error = raised
        _leave(error)


def become_leader() -> None:
    """Make this process the leader of its descendants: it adopts orphans, and SIGTERM or its parent's end kills all."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent for each thread of the parent
        end_family(os.getpid())
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    outlive_signals()
    _prctl(_CHILD_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGTERM)


def supervise(work: Callable[[], object]) -> int:
    """Call `work` in a child of this leader; return its exit code, or minus the signal that killed it."""
    child = fork(work)
    while True:
        ended, status = os.wait()  # adopted orphans end here too
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def end_leader(leader: int) -> None:
    """Kill a leader and everything that it and its children started. The caller reaps the leader."""
    with suppress(ProcessLookupError):
        os.kill(leader, signal.SIGSTOP)  # it starts nothing new, and still adopts
        end_family(leader)
        with suppress(ProcessLookupError, PermissionError):  # it leads no group yet
            os.killpg(leader, signal.SIGKILL)
        os.kill(leader, signal.SIGKILL)


def end_family(leader: int) -> None:
    """Kill descendants of a process until none is left."""
    until = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < until:
        living = 0
        with suppress(psutil.Error):
            for process in psutil.Process(leader).children(recursive=True):
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        living += 1
                        process.kill()
        if not living:
            return
        time.sleep(0.002)


def end_after(limit: float, patience: float) -> None:
    """Make the system end this process after `limit` seconds of processor time or `patience` of wall time; 0: never."""
    for number, timer, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, limit),
        (signal.SIGALRM, signal.ITIMER_REAL, patience),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, seconds)


@contextmanager
def no_copies() -> Iterator[None]:
    """Inside, a reward may fork: a copy of this process that returns from the reward ends here."""
    own = os.getpid()
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        raised = error
    if os.getpid() != own:
        _leave(raised)


def _leave(error: BaseException | None) -> NoReturn:
    """End this process at once, with Python's exit code for an exception."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    elif error is not None:
        said = [f"{error}\n"] if isinstance(error, SystemExit) else traceback.format_exception(error)
        with suppress(Exception):
            sys.stderr.write("".join(said))
    flush()
    os._exit(code)


def flush() -> None:
    """Flush standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
