"""Mistakes that a user can correct, and exceptions from a user's code."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path


class UserError(ValueError):
    """A mistake in the input: the message names what was given, what was expected and what to do.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """


def raised(error: BaseException) -> str:
    """Return a one-line description of an exception in a user's function, with file and line.

    >>> try:
    ...     float("a")
    ... except ValueError as error:
    ...     raised(error).startswith("ValueError: could not convert string to float: 'a' (")
    True
    """
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"
    places = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else said


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end; ``code`` is a shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.code = 128 + number
