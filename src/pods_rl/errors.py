"""Mistakes that a user can correct, and exceptions from a user's code."""

from __future__ import annotations

import signal
import sysconfig
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
    said = f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}".removesuffix(": ")
    places = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else said


def exit_reason(error: SystemExit) -> str:
    """Return a message on a user's code that ended a command with `sys.exit`, with its file and line.

    The place is the last one outside of Python's own library: `exit()` and argparse raise inside of it.

    >>> try:
    ...     raise SystemExit(0)
    ... except SystemExit as error:
    ...     exit_reason(error).startswith("Your code called sys.exit(0) in <module> (")
    True
    """
    library = sysconfig.get_path("stdlib")
    packages = sysconfig.get_path("purelib")
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        in_library = frame.filename.startswith((library, "<frozen")) and not frame.filename.startswith(packages)
        if not in_library:
            place = f" in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
    return f"Your code called sys.exit({error.code!r}){place}. Remove the call, or raise an exception that says why."


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end; ``code`` is a shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.code = 128 + number
