"""Mistakes that a user can correct, and exceptions from a user's code."""

from __future__ import annotations

import signal
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 200  # characters of an exception's own message


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
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:
        message = message[: _LONGEST - 3] + "..."
    description = type(error).__name__
    if message:
        description += f": {message}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return description
    innermost = frames[-1]
    return f"{description} ({Path(innermost.filename).name}, line {innermost.lineno})"


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
        # the folder of installed packages lies inside that of Python's own library
        in_packages = frame.filename.startswith(packages)
        in_library = frame.filename.startswith((library, "<frozen"))
        if in_packages or not in_library:
            place = f" in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
    return f"Your code called sys.exit({error.code!r}){place}. Remove the call, or raise an exception that says why."


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Inside, an exception of a user's code becomes a UserError of one line that names what raised it, and where.

    >>> with users_code("the task sums: Adder.reset"):
    ...     int("a")
    Traceback (most recent call last):
    pods_rl.errors.UserError: the task sums: Adder.reset raised ValueError: invalid literal for int() ...
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} raised {raised(error)}") from error


def code_reason(error: BaseException) -> str | None:
    """Return a message on an exception that passed through a user's code; None if it did not.

    A user's code is what lies outside of this package, of Python's own library and of installed packages. The message
    names its last place: a function or a class's method, with file and line.
    """
    folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = (*folders, str(Path(__file__).parent), "<frozen")
    place = None
    for trace_frame, line in traceback.walk_tb(error.__traceback__):
        code = trace_frame.f_code
        if not code.co_filename.startswith(others):
            place = f"{code.co_qualname} ({Path(code.co_filename).name}, line {line})"
    if place is None:
        return None
    message = " ".join(str(error).split())
    reason = f"Your code failed in {place}: {type(error).__name__}: {message[:_LONGEST]}".removesuffix(": ")
    return ". ".join([reason, *getattr(error, "__notes__", ())])  # a note says which call it was, and what to do


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end; ``code`` is a shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.code = 128 + number
