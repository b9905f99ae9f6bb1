"""What a method of TRL changes, reads, logs and returns, as sets of names from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

MUTATORS = {"add", "append", "appendleft", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


def parsed(method: Callable[..., Any]) -> ast.Module:
    """The syntax tree of a method, without its decorators."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))


def cut_at_call(tree: ast.Module, called: str) -> tuple[ast.Module, ast.Module]:
    """The statements of a method before the one that calls `self.<called>`, and those after it."""
    (function,) = tree.body
    calls = [called in {name for name, _ in _own_calls(statement)} for statement in function.body]
    assert calls.count(True) == 1
    at = calls.index(True)
    return ast.Module(function.body[:at], []), ast.Module(function.body[at + 1 :], [])


def changed_attributes(tree: ast.AST) -> set[str]:
    """The attributes of the trainer that are assigned, or changed by a method of a list or a dictionary."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.add(_own_attribute(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            found.add(_own_attribute(node.func.value))
    return found - {None}


def read_attributes(tree: ast.AST) -> set[str]:
    """The attributes of the trainer that are named at all."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}


def called_methods(tree: ast.AST) -> set[str]:
    return {name for name, _ in _own_calls(tree)}


def names(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The local names that are stored or loaded."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def keys_of(tree: ast.AST, dictionary: str) -> set[str]:
    """The constant keys of a dictionary: of its display, of its items and of its method `get`.

    A key with a name in it has `{}` in its place; a name alone is `{}`.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == dictionary:
            found.add(_text(node.slice))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{dictionary}.get":
            found.add(_text(node.args[0]))
        elif isinstance(node, ast.Compare) and [ast.unparse(part) for part in node.comparators] == [dictionary]:
            found.add(_text(node.left))
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and [ast.unparse(target) for target in node.targets] == [dictionary]
        ):
            found |= {_text(key) for key in node.value.keys if key is not None}
    return found


def compared_with(tree: ast.AST, expression: str) -> set[str]:
    """The texts that an expression is compared with, one by one or in a list."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == expression:
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return found


def _own_calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
            yield node.func.attr, node


def _own_attribute(node: ast.AST) -> str | None:
    """The attribute of the trainer in an expression such as `self._logs["rewards"][name]`; None if there is none."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return node.attr
        node = node.value
    return None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _text(key: ast.expr) -> str:
    if isinstance(key, ast.Constant):
        return str(key.value)
    if isinstance(key, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else str(part.value) for part in key.values)
    return "{}"
