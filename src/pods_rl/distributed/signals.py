"""Handle signals that ask a run to end: raise at once, wait for the end of the step, or forward. No torch."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..errors import Interrupted

# Ctrl-C, an ordinary end, a lost terminal, the warnings of Slurm, SGE and LSF, a limit on CPU time. Not SIGQUIT, which
# ends a process at once, nor timers, which rewards may use.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SIGNALS = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))
_ALWAYS = (signal.SIGINT, signal.SIGTERM)  # handled even if ignored: shells start background jobs with SIGINT ignored


def exit_code(status: Mapping[str, Any], default: int = 128 + signal.SIGINT) -> int:
    """Return the exit code that agrees with a run's status; `default` if a stopped run names no signal.

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
    """Records whether a signal has asked for an end.

    A signal raises Interrupted at once. Inside `later` it is only recorded, inside `passed_to` it is forwarded, and
    after `over` it is ignored. A second SIGINT also raises inside `later`.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # the first signal
        self.ended = False  # whether `over` was called
        self._later = False
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
        again, self.number = self.number is not None, self.number or number
        if self.ended:
            return
        if self._forward:
            self._forward(number, again)
        elif not self._later or (again and number == signal.SIGINT):
            raise Interrupted(number)

    def over(self) -> None:
        """Ignore all later signals: the last status of the run is being written."""
        self.ended = True

    def later(self) -> AbstractContextManager[None]:
        """Inside, a signal only sets `reason`. Raises Interrupted if one came before."""
        return self._set_later(True)

    def at_once(self) -> AbstractContextManager[None]:
        """Inside, a signal raises Interrupted again, also one that came before."""
        return self._set_later(False)

    @contextmanager
    def _set_later(self, later: bool) -> Iterator[None]:
        before, self._later = self._later, later
        try:
            if self.number is not None:
                raise Interrupted(self.number)
            yield
        finally:
            self._later = before

    @contextmanager
    def passed_to(self, send: Callable[[int, bool], None]) -> Iterator[None]:
        """Inside, a signal calls ``send(number, again)`` instead, also one that came before; `again`: not the first."""
        before, sent = self._forward, False

        def forward(number: int, again: bool) -> None:
            nonlocal sent
            if again or not sent:  # the same signal may reach both calls
                sent = True
                send(number, again)

        self._forward = forward
        try:
            if self.number is not None:
                forward(self.number, False)
            yield
        finally:
            self._forward = before


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
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {n: now for n, now in before.items() if n in _ALWAYS or now not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == stop.ask:  # otherwise `ignore_signals` was called
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore signals until this process ends. Call it in the main thread."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
