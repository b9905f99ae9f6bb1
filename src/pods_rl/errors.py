"""Mistakes that a user can correct, and exceptions from a user's code."""

from __future__ import annotations

import os
import signal
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 200  # characters of an exception's own message
# What requests, httpx, huggingface_hub and datasets raise without a network, by name: none of them is imported here.
_NO_NETWORK = frozenset((
    "ConnectionError", "ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError", "Timeout",
    "ProxyError", "SSLError", "MaxRetryError", "NameResolutionError", "gaierror", "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
))  # fmt: skip
# how datasets says it, with the configurations in the cache
_NOT_CACHED = ("Couldn't find cache for", "Couldn't reach")


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


def first_line(error: BaseException) -> str:
    """Return the first line of an error as a sentence, or its type if it has none.

    >>> first_line(ValueError("no such file\\nlook elsewhere")), first_line(KeyError())
    ('no such file.', 'KeyError.')
    """
    lines = str(error).strip().splitlines()
    message = lines[0].strip() if lines else type(error).__name__
    return message if message.endswith((".", "!")) else f"{message}."


def hub_problem(error: BaseException) -> str | None:
    """Return why the Hugging Face hub cannot be reached, if that is the cause of a loader's error; None otherwise.

    >>> hub_problem(ConnectionError("Name or service not known"))
    'ConnectionError: Name or service not known'
    >>> hub_problem(ValueError("no such split")) is None
    True
    """
    seen: list[BaseException] = []  # the error, and those that led to it
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    names = [type(cause).__name__ for cause in seen]
    if not _NO_NETWORK.intersection(names) and not str(error).startswith(_NOT_CACHED):
        return None
    if "OfflineModeIsEnabled" in names or os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set in the environment: unset it to use the network"
    # The innermost one with words says most; those around it repeat it.
    for cause in reversed(seen):
        if type(cause).__name__ in _NO_NETWORK and str(cause).strip():
            return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:_LONGEST]
    return " ".join(str(error).split())[:_LONGEST]


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end; ``code`` is a shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.code = 128 + number
