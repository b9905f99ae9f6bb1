"""Handle signals that ask a run to end: raise at once, wait for the end of the step, or forward. No torch.

A process that another one of ours started also ends with it, even if that one is killed (`end_with_parent`).
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ..errors import Interrupted

# Ctrl-C, an ordinary end, a lost terminal, the warnings of Slurm, SGE and LSF, a limit on CPU time. Not SIGQUIT, which
# ends a process at once, nor timers, which rewards may use.
_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SIGNALS = tuple(signal.Signals[name] for name in _SIGNAL_NAMES if hasattr(signal, name))
# Even if they are ignored: shells start background jobs with SIGINT ignored.
_ALWAYS_HANDLED = (signal.SIGINT, signal.SIGTERM)
PARENT = "PODS_PARENT"  # the id of the process that started this one and that it must not outlive
_PDEATHSIG = 1  # of Linux's prctl
_PARENT_POLL = 1.0  # seconds between looks at the parent on systems without prctl


def exit_code(status: Mapping[str, Any], default: int = 128 + signal.SIGINT) -> int:
    """Return the exit code that agrees with a run's status; `default` if a stopped run names no signal.

    >>> exit_code({"state": "finished"}), exit_code({"state": "stopped", "reason": "interrupted by SIGTERM"})
    (0, 143)
    >>> exit_code({"state": "failed"}), exit_code({})
    (1, 1)
    """
    state = status.get("state")
    if state == "finished":
        return 0
    if state != "stopped":
        return 1
    match = re.fullmatch("interrupted by (SIG[A-Z0-9]+)", str(status.get("reason")))
    if match is None or match[1] not in signal.Signals.__members__:
        return default
    return 128 + signal.Signals[match[1]]


def how_it_ended(code: int) -> str:
    """Return how a process ended, by its exit code, which is negative for a signal that killed it.

    >>> how_it_ended(3), how_it_ended(-9)
    ('exit code 3', 'killed by signal 9 (SIGKILL), perhaps out of memory')
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    cause = ", perhaps out of memory" if name == "SIGKILL" else ""
    return f"killed by signal {-code} ({name}){cause}"


class Stop:
    """Records whether a signal has asked for an end.

    A signal raises Interrupted at once. Inside `later` it is only recorded, inside `passed_to` it is forwarded, and
    after `over` it is ignored. A second SIGINT also raises inside `later`.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # the first signal
        self.ended = False  # whether `over` was called
        self._later = False
        self._notice = ""  # printed at the first signal inside `later`
        self._forward: Callable[[int, bool], None] | None = None

    @property
    def reason(self) -> str | None:
        """The reason for a run's status; None without a signal.

        >>> stop = Stop()
        >>> with stop.later():
        ...     stop.ask(15)
        >>> stop.reason, stop.code
        ('interrupted by SIGTERM', 143)
        """
        return None if self.number is None else str(Interrupted(self.number))

    @property
    def code(self) -> int:
        """The exit code of a run that was stopped: 128 plus the number of the signal."""
        return 128 + (self.number or signal.SIGINT)

    def ask(self, number: int, _: object = None) -> None:
        """Handle a signal."""
        is_first = self.number is None
        if is_first:
            self.number = number
        if self.ended:  # the last status is being written
            return
        if self._forward is not None:
            self._forward(number, not is_first)
            return
        is_second_ctrl_c = number == signal.SIGINT and not is_first
        if not self._later or is_second_ctrl_c:
            raise Interrupted(number)
        if is_first and self._notice:
            print_notice(f"Interrupted by {signal.Signals(number).name}: {self._notice}")

    def over(self) -> None:
        """Ignore all later signals: the last status of the run is being written."""
        self.ended = True

    def later(self, notice: str = "") -> AbstractContextManager[None]:
        """Inside, a signal only sets `reason`. Raises Interrupted if one came before.

        Args:
            notice: what happens now and at a second Ctrl-C, printed at once when the first signal arrives.
        """
        return self._set_later(True, notice)

    def at_once(self) -> AbstractContextManager[None]:
        """Inside, a signal raises Interrupted again, also one that came before."""
        return self._set_later(False, "")

    @contextmanager
    def _set_later(self, later: bool, notice: str) -> Iterator[None]:
        later_before = self._later
        notice_before = self._notice
        self._later = later
        self._notice = notice
        try:
            if self.number is not None:
                raise Interrupted(self.number)
            yield
        finally:
            self._later = later_before
            self._notice = notice_before

    @contextmanager
    def passed_to(self, send: Callable[[int, bool], None]) -> Iterator[None]:
        """Inside, a signal calls ``send(number, again)`` instead, also one that came before; `again`: not the first."""
        forward_before = self._forward
        is_sent = False

        def forward(number: int, again: bool) -> None:
            nonlocal is_sent
            if again or not is_sent:  # the first signal may reach both the handler and the call below
                is_sent = True
                send(number, again)

        self._forward = forward
        try:
            if self.number is not None:
                forward(self.number, False)
            yield
        finally:
            self._forward = forward_before


def end_on_signals() -> None:
    """Let a signal end this process at once, with one line and its exit code.

    For the time before and after a command's work, which `stop_on_signals` covers: there is nothing to save, and an
    exception could be raised inside of any import. Does nothing in a thread other than the main one, which cannot set
    handlers.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _not_ignored():
            signal.signal(number, _end_process)


def _end_process(number: int, _: object) -> None:
    print_notice(f"Stopped: {Interrupted(number)}.")
    os._exit(128 + number)


def _not_ignored() -> list[signal.Signals]:
    """Return the signals to handle: those that were ignored when this process started stay so."""
    numbers = []
    for number in SIGNALS:
        is_ignored = signal.getsignal(number) in (signal.SIG_IGN, None)
        if number in _ALWAYS_HANDLED or not is_ignored:
            numbers.append(number)
    return numbers


@contextmanager
def signals_held(numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Inside, these signals wait; a process that starts here holds them until it unblocks them."""
    held_before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_before)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Send signals to a `Stop`, and restore the former handlers at the end. A nested call yields the same `Stop`.

    Signals that are ignored at the start stay so, as SIGHUP under `nohup`. Only the main thread can set handlers: in
    another thread no signal reaches the `Stop`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Stop()
        return
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(outer, Stop):
        yield outer
        return
    stop = Stop()
    handlers_before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _not_ignored()}
    for number in handlers_before:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in handlers_before.items():
            if signal.getsignal(number) == stop.ask:  # otherwise `ignore_signals` was called
                signal.signal(number, handler)


def print_notice(text: str) -> None:
    """Print a line to standard error at once; safe in a signal handler, which may interrupt another print.

    It does not wait: if the reader of standard error is slow or gone, nothing is printed.
    """
    line = f"{text}\n"
    with suppress(OSError, ValueError):
        if os.isatty(2):
            line = f"\n{line}"  # the terminal shows ^C and a line of progress
        _, writable, _ = select.select([], [2], [], 0)
        if writable:
            os.write(2, line.encode("ascii", "backslashreplace"))


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process when the process ends that started it.

    Args:
        parent: the id of that process, read before it started this one: afterwards another process may have adopted
            this one. If None, the process that named itself in `PARENT`. Without the variable, or if it names another
            process that still runs, nothing happens. The processes that this one starts do not inherit the variable.
    """
    named = os.environ.pop(PARENT, "")
    if parent is None:
        if not named.isdigit():
            return
        parent = int(named)
        if os.getppid() != parent and _runs(parent):
            return
    if sys.platform == "linux":
        kill_at_parent_death(signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it was killed while this process started
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at_parent_death(number: int) -> None:
    """Have Linux send this process a signal when the thread ends that started it. Does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, int(number), 0, 0, 0)


def _runs(process: int) -> bool:
    """Return whether a process runs; one that was killed is a zombie until its own parent reads how it ended."""
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL)
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_signals() -> None:
    """Ignore signals until this process ends. Call it in the main thread.

    Sets a handler that does nothing, and not SIG_IGN: if a signal arrives just when SIG_IGN replaces its handler,
    Python prints a traceback.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
