"""Ends that are asked for from outside: SIGINT and SIGTERM, met at once or after the step. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A signal that ends what is being done; ``code`` is the exit code that says which, as a shell has it."""

    def __init__(self, number: int) -> None:
        super().__init__(reason(number))
        self.code = 128 + number


def reason(number: int) -> str:
    """What a run's status says of a signal.

    >>> reason(15)
    'interrupted by SIGTERM'
    """
    return f"interrupted by {signal.Signals(number).name}"


class Stop:
    """Whether a signal has asked for an end. It is met at once, but within `later` when the one inside asks.

    A second SIGINT is met at once wherever it comes.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._later = False

    @property
    def reason(self) -> str | None:
        """Which signal came, None where none did."""
        return None if self._number is None else reason(self._number)

    @property
    def code(self) -> int:
        """The exit code of a run that was stopped: 128 and the signal's number."""
        return 128 + (self._number or signal.SIGINT)

    def ask(self, number: int, _: object = None) -> None:
        """The signals' handler."""
        again, self._number = self._number is not None, self._number or number
        if not self._later or (again and number == signal.SIGINT):
            raise Interrupted(number)

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
    def _met(self, *, later: bool) -> Iterator[None]:
        before, self._later = self._later, later
        try:
            yield
        finally:
            self._later = before


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Have SIGINT and SIGTERM ask a `Stop`; in the main thread, which alone may set handlers."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
