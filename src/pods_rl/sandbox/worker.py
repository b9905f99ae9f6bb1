"""The worker's side of a pool: a leader process and the child that answers.

The leader makes the work once and replaces a child that dies, which takes milliseconds. It adopts orphans of the
work's processes, so that all of them can be found and killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import psutil

from ..distributed.signals import SIGNALS, kill_at_parent_death, signals_held
from ..errors import UserError, raised

_CHILD_SUBREAPER = 36  # of Linux's prctl
HANDLED_BY_TRAINER = [number for number in SIGNALS if number != signal.SIGTERM]
_KILL_SECONDS = 10.0  # a killed process can take this long to end while it waits for a disk


class Work(NamedTuple):
    """The work of a worker: `answer` maps a question to a JSON value; `prepare` is called in each child."""

    answer: Callable[[Any], Any]
    prepare: Callable[[], object] = lambda: None


class Reply(NamedTuple):
    """A worker's reply.

    `kind` is "gave" (`value` is the result), "raised" (`value` is the reason, as text), "refused" (a UserError's text),
    or the failure: "timeout" or "crash" (the process ended, or something else wrote into the channel).
    """

    kind: str
    value: Any = None


def frame(number: int, value: Any) -> bytes:
    """Return a line of JSON with a value and the number of its request. Arrays become lists, other objects text."""
    return json.dumps([number, value], default=_as_json).encode() + b"\n"


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or a tensor
        return value.tolist()
    return str(value)


def unframe(line: bytes, number: int) -> Reply | None:
    """Return the reply in a line, or None if it does not answer this request. Nothing is unpickled.

    >>> unframe(frame(7, Reply("gave", 0.5)), 7)
    Reply(kind='gave', value=0.5)
    >>> unframe(b"0.5", 7), unframe(frame(6, Reply("gave", 0.5)), 7), unframe(b"", 7)
    (None, None, None)
    """
    with suppress(ValueError, TypeError):
        received, (kind, value) = json.loads(line)
        if type(received) is int and received == number:
            return Reply(kind, value)
    return None


def main(maker: str, *arguments: str) -> None:
    """Lead the work that the function at path `maker` returns for these arguments; standard input is the channel."""
    from ..streams import outlive_output  # not for processes that only import `no_copies`

    os.dup2(2, 1)  # the work's output goes to standard error
    module, _, name = maker.partition(":")
    with outlive_output():  # without a reader, it is dropped
        lead(0, lambda: getattr(import_module(module), name)(*arguments))


def lead(descriptor: int, make: Callable[[], Work]) -> None:
    """Make the work, confirm it with the reply to request 0, and have a child answer until the channel closes.

    For a child that dies at a question, this process replies "timeout" or "crash".

    Args:
        descriptor: of the channel; it is replaced by one that programs of the work do not inherit.
        make: returns the work.
    """
    os.setsid()  # Ctrl-C is for the training process alone
    channel = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # an empty standard input, also for programs that the work starts
    if descriptor != 0:
        os.close(descriptor)
    try:
        signal.signal(signal.SIGTERM, _end_at_signal)
        _outlive_signals()
        if sys.platform == "linux":  # become the parent of every orphan among this process's descendants
            ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
        kill_at_parent_death(signal.SIGTERM)
        with no_copies():
            work = make()
    except BaseException as error:
        return _send(channel, frame(0, _refusal(error)))
    _send(channel, frame(0, Reply("gave")))
    current = mmap.mmap(-1, 8)  # shared with the child: the number of the request that it works on, or 0
    while True:
        current[:] = bytes(8)
        child = fork(partial(_serve, channel, work, current))
        ended, status = os.wait()
        while ended != child:  # an adopted orphan
            ended, status = os.wait()
        number = int.from_bytes(current[:], "big")
        if number != 0:
            # The system ends a child with SIGPROF when it reaches its limit.
            is_late = os.waitstatus_to_exitcode(status) == -signal.SIGPROF
            _send(channel, frame(number, Reply("timeout" if is_late else "crash")))


def _serve(channel: int, work: Work, current: mmap.mmap) -> None:
    """Answer the requests of the channel, one after the other, until it closes."""
    work.prepare()
    with open(channel, "rb", closefd=False) as requests:
        for request in requests:
            number, (question, limit) = json.loads(request)
            current[:] = number.to_bytes(8, "big")
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the system ends this process at its limit
            signal.setitimer(signal.ITIMER_PROF, limit)
            try:
                with no_copies():
                    reply = frame(number, Reply("gave", work.answer(question)))
            except BaseException as error:  # SystemExit too
                reply = frame(number, _refusal(error))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            _flush()
            _send(channel, reply)  # if the work has closed the channel, this process ends here
            current[:] = bytes(8)
    os.kill(os.getppid(), signal.SIGTERM)  # the pool is gone


def _refusal(error: BaseException) -> Reply:
    if isinstance(error, UserError):
        return Reply("refused", " ".join(str(error).split()))
    return Reply("raised", raised(error))


def _send(channel: int, data: bytes) -> None:
    with suppress(ConnectionError):  # the pool is gone
        while data:
            data = data[os.write(channel, data) :]


def _end_at_signal(*_: object) -> None:
    """End a leader and its descendants, at SIGTERM or its parent's end."""
    # Linux sends SIGTERM for each thread of the parent. It is blocked, because Python prints a traceback if a signal
    # arrives just when SIG_IGN replaces its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _end_family(psutil.Process())
    os._exit(1)


def fork(work: Callable[[], object]) -> int:
    """Call `work` in a child of this process; return its process id. On Linux it does not outlive this process."""
    _flush()  # otherwise both would print the buffer
    parent = os.getpid()
    with signals_held(HANDLED_BY_TRAINER):
        child = os.fork()
        if child != 0:
            return child
        try:
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            _outlive_signals()
            kill_at_parent_death(signal.SIGKILL)
            if os.getppid() == parent:  # it has not ended before the line above
                work()
        finally:
            _leave(sys.exc_info()[1])


@contextmanager
def no_copies() -> Iterator[None]:
    """Inside, a reward may fork: a copy of this process that returns from the reward ends here."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            _leave(sys.exc_info()[1])


def _leave(error: BaseException | None) -> NoReturn:
    """End this process at once, with Python's exit code for an exception."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = (error.code or 0) & 0xFF
    elif error is not None:
        with suppress(Exception):
            traceback.print_exception(error)
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _outlive_signals() -> None:
    """Ignore the signals that ask a run to end, which reach all its processes: the trainer ends this one.

    A handler does this, because programs started by a reward would inherit ignored signals.
    """
    for number in HANDLED_BY_TRAINER:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_BY_TRAINER)


def end_leader(leader: psutil.Process) -> None:
    """Kill a leader and everything that it and its children started. The caller reaps the leader."""
    with suppress(psutil.NoSuchProcess):
        leader.suspend()  # it starts nothing new, and still adopts
        _end_family(leader)
        with suppress(ProcessLookupError, PermissionError):  # it leads no group yet
            os.killpg(leader.pid, signal.SIGKILL)
        leader.kill()


def _end_family(leader: psutil.Process) -> None:
    """Kill descendants of a process until none is left."""
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        any_alive = False
        for process in leader.children(recursive=True):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    any_alive = True
                    process.kill()
        if not any_alive or time.monotonic() >= deadline:
            return
        time.sleep(0.002)
