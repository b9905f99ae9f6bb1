"""Mistakes a person can mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave us: the message says what came, what was expected and what to do next.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """
