"""Mistakes that a user can fix, and exceptions from a user's code."""

from __future__ import annotations

import traceback
from pathlib import Path


class UserError(ValueError):
    """A mistake in what the user gave us: the message says what came, what was expected and what to do next.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """


def add_note(error: BaseException, note: str) -> None:
    """Add a line that Python prints below the exception; Python 3.10 keeps it and does not print it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]


def raised(error: BaseException) -> str:
    """What an exception from a user's function says, in one line, with the place in their file.

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
