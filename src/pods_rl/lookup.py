"""Find what a user names: an entry of one of our tables, or a function of their own by its import path."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from .errors import UserError
from .stopping import interrupted

Entry = TypeVar("Entry")


def find(kind: str, name: str, table: Mapping[str, Entry]) -> Entry | Callable[..., Any]:
    """The entry of that name, or the function at that import path.

    Args:
        kind: what is looked for, for messages: rule, reward, task.
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
        raise UserError(f"a {kind} is given by its name, a string; got {name!r}. {choices}")
    if name in table:
        return table[name]
    if ":" not in name and "." not in name:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f": did you mean '{near[0]}'?" if near else "."
        raise UserError(f"unknown {kind} '{name}'{hint} {choices}")
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        found = getattr(import_module(module), attribute)
    except BaseException as error:  # a user's module may fail in any way, and exit
        if isinstance(error, KeyboardInterrupt) and interrupted(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        if isinstance(error, SystemExit):
            reason += ', so the module exits when it is imported: move that below `if __name__ == "__main__":`'
        raise UserError(f"the {kind} '{name}' could not be imported: {reason}. {choices}") from error
    if not callable(found):
        raise UserError(f"the {kind} '{name}' is a {type(found).__name__}, not a function. {choices}")
    return found
