"""Names that a user gives, text that is safe to print, and chat messages as text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import cleandoc
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

Entry = TypeVar("Entry")

DEEPEST = 200
"""Nested lists and objects in what others wrote; Python's own limit depends on the caller."""
TOO_DEEP = "nested too deeply"

_SHORT = Repr()
_SHORT.maxstring = 60
_SHORT.maxother = 60

# C0 and C1 controls except newline and tab, and marks that change the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def find(kind: str, name: str, table: Mapping[str, Entry]) -> Entry | Callable[..., Any]:
    """Return the entry of that name, or the function at that import path.

    Args:
        kind: rule, reward or task, for messages.
        name: a key of the table, or a function's path, `package.module:function` or `package.module.function`.
        table: entries by name; empty if only import paths are allowed.

    Raises:
        UserError: an unknown name (with the nearest one), or a path that does not lead to a function.

    >>> find("number", "one", {"one": 1})
    1
    >>> find("number", "on", {"one": 1})
    Traceback (most recent call last):
    pods_rl.errors.UserError: unknown number 'on'. Did you mean one? ...
    >>> find("check", "on", {})
    Traceback (most recent call last):
    pods_rl.errors.UserError: unknown check 'on'. Give it as package.module:function.
    """
    name = str(name)
    if name in table:
        return table[name]
    named = f"Choose one of {', '.join(table)}, or give your own" if table else "Give it"
    choices = f"{named} as package.module:function."
    if ":" not in name and "." not in name:
        raise UserError(f"unknown {kind} '{name}'.{suggest(name, table)} {choices}")
    what = f"the {kind} '{name}'"
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        function = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        if isinstance(error, SystemExit):
            reason += ', so the module exits when it is imported: move that below `if __name__ == "__main__":`'
        raise UserError(f"{what} could not be imported: {reason}. {choices}") from error
    if not callable(function):
        raise UserError(f"{what} is a {type(function).__name__}, not a function. {choices}")
    return function


def suggest(word: str, names: Iterable[str]) -> str:
    """Return `` Did you mean ...?`` with the nearest name, or nothing if none is near.

    >>> suggest("num_rolouts", ["num_rollouts", "seed"])
    ' Did you mean num_rollouts?'
    """
    with_underscores = {name.replace("-", "_"): name for name in names}
    near = difflib.get_close_matches(word.replace("-", "_"), with_underscores, n=1, cutoff=0.7)
    return f" Did you mean {with_underscores[near[0]]}?" if near else ""


def short(text: str, most: int = 60) -> str:
    """Return a text cut to a length that fits a message.

    >>> short("a" * 100, most=8)
    'aaaaa...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def counted(number: float, noun: str, plural: str = "s") -> str:
    """Return a number with its noun.

    >>> counted(1, "CPU thread"), counted(2, "batch", "es")
    ('1 CPU thread', '2 batches')
    """
    if number != 1:
        noun += plural
    return f"{number:,.10g} {noun}"


def documented_arguments(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument.

    >>> documented_arguments("Select.\\n\\nArgs:\\n    n: how many\\n        rollouts.\\n    m: how many kept.")
    {'n': 'how many rollouts.', 'm': 'how many kept.'}
    """
    section = cleandoc(docstring).partition("Args:\n")[2].partition("\n\n")[0]
    arguments = re.findall(r"^ {4}(\w+): (.*(?:\n {5}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in arguments}


def describe(value: object) -> str:
    """Return a value and its type, short enough for a message.

    >>> describe([1, 2]), describe(True), describe(None)
    ('the list [1, 2]', 'true', 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > 10**60:  # Python refuses to print numbers of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = short(_SHORT.repr(value))  # Repr handles a list that contains itself
    kinds = {str: "the text ", list: "the list ", dict: "the mapping ", int: "", float: ""}
    return kinds.get(type(value), f"{type(value).__name__} ") + text


def safe_text(value: object) -> str:
    """Escape text for `console().print`: control characters become \\x1b and the like, markup is escaped.

    >>> safe_text("[red]\\x1b[2J")
    '\\\\[red]\\\\x1b[2J'
    """
    from rich.markup import escape

    return escape(plain_text(value))


def plain_text(value: object) -> str:
    """Escape text for plain output: control characters become \\x1b and the like.

    >>> print(plain_text("a\\x1bb"))
    a\\x1bb
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(value))


def utf8_text(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot hold; all other text stays.

    >>> utf8_text("a\\ud800\\x1b")
    'a\\\\ud800\\x1b'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def change_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with every text in its lists and mappings changed, and their keys.

    >>> change_text({"a": ("b", 1)}, str.upper)
    {'A': ['B', 1]}
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_text(key, change): change_text(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [change_text(part, change) for part in value]
    return value


def content_text(content: object) -> str:
    """Return the content of a chat message as text: parts on lines of their own, an image as `[image]`.

    >>> content_text([{"type": "image", "image": object()}, {"type": "text", "text": "What is it?"}])
    '[image]\\nWhat is it?'
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _json(content)
    lines = []
    for part in content:
        if not isinstance(part, Mapping) or "type" not in part:  # not a message of parts, but any other list
            return _json(content)
        text = part.get("text")
        lines.append(text if isinstance(text, str) else f"[{part['type']}]")
    return "\n".join(lines)


def call_text(call: object) -> str:
    """Return a tool call of a chat message as `name(arguments)`.

    >>> call_text({"type": "function", "function": {"name": "add", "arguments": {"a": 1, "to": "b"}}})
    'add(a=1, to="b")'
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return _json(call)
    arguments = function.get("arguments") or ""
    if depth(call) > DEEPEST:
        arguments = TOO_DEEP
    elif isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())
    return f"{content_text(function.get('name'))}({content_text(arguments)})"


def _json(value: object) -> str:
    """Return a value as JSON, or as text where JSON has no form for it."""
    if depth(value) > DEEPEST:
        return TOO_DEEP
    return json.dumps(value, ensure_ascii=False, default=lambda part: f"[{type(part).__name__.lower()}]", skipkeys=True)


def depth(value: object) -> int:
    """Return how deep lists and objects nest, 1 for a flat row; without recursion.

    >>> depth("a"), depth([]), depth({"a": [1]})
    (0, 1, 2)
    """
    depth = 0
    level = [value]  # all values of one depth
    while True:
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return depth
        depth += 1
        level = []
        for container in containers:
            level.extend(container.values() if isinstance(container, dict) else container)


def console(*, stderr: bool = False) -> Console:
    """Return a console that does not colour paths and numbers; plain text if the output is not a terminal."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with code 1; the command line gives the right code

    return Plain(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)
