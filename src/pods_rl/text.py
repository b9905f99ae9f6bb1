"""Functions that a user names, and text that is safe to print."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UserError, interrupted

if TYPE_CHECKING:
    from rich.console import Console

Entry = TypeVar("Entry")

# C0 and C1 controls except newline and tab, and marks that change the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def find(kind: str, name: str, table: Mapping[str, Entry]) -> Entry | Callable[..., Any]:
    """Return the entry of that name, or the function at that import path.

    Args:
        kind: rule, reward or task, for messages.
        name: a key of the table, or a function's path, `package.module:function` or `package.module.function`.
        table: entries by name.

    Raises:
        UserError: an unknown name (with the nearest one), or a path that does not lead to a function.

    >>> find("number", "one", {"one": 1})
    1
    >>> find("number", "on", {"one": 1})
    Traceback (most recent call last):
    pods_rl.errors.UserError: unknown number 'on': did you mean 'one'? ...
    """
    choices = f"Choose one of {', '.join(table)}, or give your own as package.module:function."
    if not isinstance(name, str):
        raise UserError(f"a {kind} must be the name of one; got {name!r}. {choices}")
    if name in table:
        return table[name]
    if ":" not in name and "." not in name:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f": did you mean '{near[0]}'?" if near else "."
        raise UserError(f"unknown {kind} '{name}'{hint} {choices}")
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        found = getattr(import_module(module), attribute)
    except BaseException as error:  # a user's module may raise anything, SystemExit too
        if isinstance(error, KeyboardInterrupt) and interrupted(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        if isinstance(error, SystemExit):
            reason += ', so the module exits when it is imported: move that below `if __name__ == "__main__":`'
        raise UserError(f"the {kind} '{name}' could not be imported: {reason}. {choices}") from error
    if not callable(found):
        raise UserError(f"the {kind} '{name}' is a {type(found).__name__}, not a function. {choices}")
    return found


def safe_text(value: object) -> str:
    """Escape text for `console().print`: control characters become \\x1b and the like, markup is escaped.

    >>> safe_text("[red]\\x1b[2J")
    '\\\\[red]\\\\x1b[2J'
    """
    from rich.markup import escape

    return escape(plain_text(value))


def plain_text(value: object) -> str:
    """Escape text for plain output: control characters become \\x1b and the like.

    >>> plain_text("a\\rb")
    'a\\\\x0db'
    """
    return _CONTROL.sub(lambda match: _shown(match[0]), str(value))


def console(*, stderr: bool = False) -> Console:
    """Return a console that does not colour paths and numbers; plain text if the output is not a terminal."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with code 1; the command line gives the right code

    return Plain(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


def _shown(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
