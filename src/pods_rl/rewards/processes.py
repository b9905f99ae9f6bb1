"""What the processes that call rewards have in common: how they start, what they send, and how they end.

Each has a leader that does nothing but fork the child that works. The leader adopts what the reward's own processes
leave behind, so that all of it can be found and killed. Replies are numbered, and only the child itself may send them.
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
from typing import Any, NoReturn

import psutil

from ..distributed.signals import SIGNALS

CAN_FORK = hasattr(os, "fork")
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of Linux's prctl
_ASK_THE_TRAINER = [number for number in SIGNALS if number != signal.SIGTERM]
_KILL_SECONDS = 10.0  # a killed process can take this long to go, where it waits for a disk


# -- messages ---------------------------------------------------------------------------------------------------------


def frame(number: int, value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """A line that carries a value and the number of the request that it answers.

    >>> unframe(frame(7, {"score": 0.5}), 7)
    {'score': 0.5}
    """
    return json.dumps([number, value], default=default).encode() + b"\n"


def unframe(line: str | bytes, number: int) -> Any:
    """The value of a line. Raises ValueError where it is not the reply to this request."""
    parts = json.loads(line)
    if not isinstance(parts, list) or len(parts) != 2 or type(parts[0]) is not int or parts[0] != number:
        raise ValueError(f"expected the reply to request {number}")
    return parts[1]


class Private:
    """Pipes of this process that a reward must not touch: processes that it forks do not have them.

    A program that the reward starts does not have them either, since Python opens pipes with close-on-exec.
    """

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors
        self._pipes = self._identities()
        os.register_at_fork(after_in_child=self._close)

    def check(self) -> None:
        """End this process if a descriptor was closed: its number may stand for a file of the reward's by now."""
        if not self._whole():
            os._exit(1)

    def send(self, descriptor: int, data: bytes) -> None:
        self.check()
        while data:
            data = data[os.write(descriptor, data) :]

    def _whole(self) -> bool:
        with suppress(OSError):
            return self._identities() == self._pipes
        return False

    def _identities(self) -> list[tuple[int, int]]:
        return [(status.st_dev, status.st_ino) for status in map(os.fstat, self._descriptors)]

    def _close(self) -> None:
        if self._whole():
            for descriptor in self._descriptors:
                os.close(descriptor)


@contextmanager
def no_copies() -> Iterator[None]:
    """Inside, a reward may fork: a copy of this process that comes out of it ends, as a program of its own would."""
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
    """End this process at once, with the exit code that Python gives for an exception."""
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
    """Print what is still buffered."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def without_input() -> None:
    """Make standard input empty, here and in every program that is started from here."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.set_inheritable(0, True)
    if null:
        os.close(null)


# -- start and end ----------------------------------------------------------------------------------------------------


@contextmanager
def signals_held() -> Iterator[None]:
    """Inside, signals that ask a run to end wait; a process that starts here holds them until `outlive_signals`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASK_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals() -> None:
    """Let a signal that asks a run to end, sent to all its processes, change nothing here: the trainer ends this one.

    They are handled rather than ignored, because a program that a reward starts inherits what is ignored.
    """
    for number in _ASK_THE_TRAINER:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASK_THE_TRAINER)


def fork(work: Callable[[], object]) -> int:
    """Call `work` in a child of this process; the child's process id. On Linux it does not outlive this process."""
    flush()  # else both would print it
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


def lead() -> None:
    """Make this process the leader of what it starts: it adopts orphans, and SIGTERM or its parent's end kills all."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes for each thread of the parent
        end_family(os.getpid())
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    outlive_signals()
    _prctl(_CHILD_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGTERM)


def supervise(work: Callable[[], object]) -> int:
    """Call `work` in a child of this leader; its exit code, or the negative number of the signal that killed it."""
    child = fork(work)
    while True:
        ended, status = os.wait()  # adopted orphans end here too
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def end_leader(leader: int) -> None:
    """Kill a leader and everything that it and its children started. The caller reaps the leader."""
    with suppress(ProcessLookupError):
        os.kill(leader, signal.SIGSTOP)  # it starts nothing anew, and still adopts
        end_family(leader)
        with suppress(ProcessLookupError, PermissionError):  # it leads no group yet
            os.killpg(leader, signal.SIGKILL)
        os.kill(leader, signal.SIGKILL)


def end_family(leader: int) -> None:
    """Kill every descendant of a process, until there is none."""
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


def give_up_after(limit: float, patience: float) -> None:
    """Have the system end this process after `limit` seconds of processor time or `patience` of wall time; 0: never."""
    if hasattr(signal, "setitimer"):
        for number, timer, seconds in (
            (signal.SIGPROF, signal.ITIMER_PROF, limit),
            (signal.SIGALRM, signal.ITIMER_REAL, patience),
        ):
            signal.signal(number, signal.SIG_DFL)
            signal.setitimer(timer, seconds)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
