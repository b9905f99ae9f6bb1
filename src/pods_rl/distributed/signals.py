"""Signals that ask a run to end: raised at once, after the step, or passed on to other processes. No torch."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import Interrupted

# Ctrl-C, an ordinary end, a lost terminal, the warnings of Slurm, SGE and LSF, a limit on CPU time; not SIGQUIT, which
# ends a process at once, nor timers, which rewards may use.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SIGNALS = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))
_ALWAYS = (signal.SIGINT, signal.SIGTERM)  # a shell starts background jobs with SIGINT ignored


def reason(number: int) -> str:
    """Return what a run's status says of a signal.

    >>> reason(15)
    'interrupted by SIGTERM'
    """
    return f"interrupted by {signal.Signals(number).name}"


def exit_code(status: Mapping[str, Any], default: int = 128 + signal.SIGINT) -> int:
    """Return the exit code that agrees with a run's status; `default` where it was stopped and does not say by what.

    >>> exit_code({"state": "finished"}), exit_code({"state": "stopped", "reason": "interrupted by SIGTERM"})
    (0, 143)
    >>> exit_code({"state": "failed"}), exit_code({})
    (1, 1)
    """
    if status.get("state") != "stopped":
        return int(status.get("state") != "finished")
    found = re.fullmatch("interrupted by (SIG[A-Z0-9]+)", str(status.get("reason")))
    return 128 + signal.Signals[found[1]] if found and found[1] in signal.Signals.__members__ else default


class Stop:
    """Whether a signal has asked for an end.

    It raises Interrupted at once; but not within `later`, nor within `passed_to`, nor after `over`. A second SIGINT
    raises within `later` as well.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._later = self._over = False
        self._send: Callable[[int, bool], None] | None = None

    @property
    def reason(self) -> str | None:
        """Which signal came, None where none did."""
        return None if self._number is None else reason(self._number)

    @property
    def number(self) -> int | None:
        """The first signal that came."""
        return self._number

    @property
    def code(self) -> int:
        """The exit code of a run that was stopped: 128 and the signal's number."""
        return 128 + (self._number or signal.SIGINT)

    @property
    def ended(self) -> bool:
        """Whether `over` was called."""
        return self._over

    def ask(self, number: int, _: object = None) -> None:
        """Handle a signal."""
        again, self._number = self._number is not None, self._number or number
        if self._over:
            return
        if self._send:
            self._send(number, again)
        elif not self._later or (again and number == signal.SIGINT):
            raise Interrupted(number)

    def over(self) -> None:
        """Let no signal raise from here on: the end of the run is being written, and its exit code with it."""
        self._over = True

    @contextmanager
    def later(self) -> Iterator[None]:
        """Within, a signal only leaves its `reason`. Raises Interrupted where one came before."""
        with self._met(later=True):
            if self._number is not None:
                raise Interrupted(self._number)
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal raises Interrupted again, also one that came before."""
        with self._met(later=False):
            if self._number is not None:
                raise Interrupted(self._number)
            yield

    @contextmanager
    def passed_to(self, send: Callable[[int, bool], None]) -> Iterator[None]:
        """Within, a signal calls ``send(number, again)`` instead, also one that came before; `again` after a first."""
        before, heard = self._send, False

        def hear(number: int, again: bool) -> None:
            nonlocal heard
            if again or not heard:
                heard = True
                send(number, again)

        self._send = hear
        try:
            if self._number is not None:
                hear(self._number, False)
            yield
        finally:
            self._send = before

    @contextmanager
    def _met(self, *, later: bool) -> Iterator[None]:
        before, self._later = self._later, later
        try:
            yield
        finally:
            self._later = before


def heeded() -> list[signal.Signals]:
    """Return the signals to handle: not those that this process was started to ignore, as `nohup` does with SIGHUP."""
    return [n for n in SIGNALS if n in _ALWAYS or signal.getsignal(n) not in (signal.SIG_IGN, None)]


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Have signals ask a `Stop`; in the main thread, which alone may set handlers. Within another it yields the same.

    At the end the former handlers are back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Stop()
        return
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(outer, Stop):
        yield outer
        return
    stop = Stop()
    before = {number: signal.getsignal(number) for number in heeded()}
    for number in before:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == stop.ask:  # else `ignore_signals` was called
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Let no signal change how this process ends; in the main thread."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
