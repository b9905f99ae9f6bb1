"""One key of a recipe: its type, default and help, and how a value from YAML or the command line becomes
it."""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

import yaml

from .reading import load_yaml, short

COMPUTED = "(chosen at run time)"  # a default that is no literal in the source
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_LARGEST = 2**63 - 1  # what torch and the files of a run hold
_MOST_ITEMS = 10_000  # in a list or mapping, at all levels
_DEEPEST = 32
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "None": "null",
}


@dataclass(frozen=True)
class Field:
    """A key: ``kinds`` names the YAML types it takes (keys of _NAMES, or ``Any``), ``item`` those of a
    list's items.

    ``section`` says which part of a run reads it (engine, model, task, run), ``source`` where its default
    is from.
    """

    name: str
    kinds: frozenset[str]
    default: Any
    help: str
    section: str
    source: str
    item: frozenset[str] | None = None
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What it takes, in words.

        >>> Field("x", frozenset({"float", "None"}), None, "", "run", "").expected
        'a number or null'
        """
        if self.choices and self.kinds <= {"str", "list", "None"}:
            kinds = ["one of " + ", ".join(self.choices)]
            return " or ".join(kinds + (["null"] if "None" in self.kinds else []))
        if "Any" in self.kinds:
            return "anything"
        return " or ".join(words for kind, words in _NAMES.items() if kind in self.kinds)

    def convert(self, value: Any) -> Any:
        """The value as this key's type; ValueError (what came, what was expected) where it is of another.

        Numbers written as text are read as numbers: YAML 1.1 calls ``1e-6`` text, and its meaning is clear.

        >>> Field("learning_rate", frozenset({"float"}), 1e-6, "", "engine", "").convert("1e-6")
        1e-06
        """
        check_plain(value)
        if "Any" in self.kinds:
            return value
        converted = _convert(value, self.kinds, self.choices)
        if converted is _WRONG:
            raise ValueError(f"got {describe(value)}, expected {self.expected}")
        if self.choices and isinstance(converted, str) and converted not in self.choices:
            raise ValueError(f"got {describe(value)}, expected {self.expected}")
        if isinstance(converted, list) and self.item is not None:
            return [self._item(place, item) for place, item in enumerate(converted)]
        return converted

    def parse(self, text: str) -> Any:
        """The value of a command-line word, read as YAML unless the key takes nothing but text.

        >>> Field("seeds", frozenset({"list"}), None, "", "run", "").parse("[1, 2]")
        [1, 2]
        """
        if self.kinds <= {"str"}:
            return self.convert(text)
        try:
            value, _ = load_yaml(text)
        except yaml.YAMLError:
            value = text
        if "str" in self.kinds:  # `--run_name 12` is a name, `--answer_after ####` no comment
            empty = value is None and text.strip() not in ("null", "~")
            if empty or _convert(value, self.kinds - {"str"}, self.choices) is _WRONG:
                value = text
        return self.convert(value)

    def _item(self, place: int, item: Any) -> Any:
        converted = _convert(item, self.item or frozenset(), ())
        if self.choices and converted not in self.choices:
            raise ValueError(f"got {describe(item)} in the list, expected some of {', '.join(self.choices)}")
        if converted is _WRONG:
            wanted = " or ".join(words for kind, words in _NAMES.items() if kind in (self.item or ()))
            raise ValueError(f"got {describe(item)} as item {place + 1} of the list, expected {wanted}")
        return converted


def describe(value: Any) -> str:
    """A value and its type, short enough for a message.

    >>> describe([1, 2]), describe(True), describe(None)
    ('the list [1, 2]', 'true', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**60:  # Python writes no number of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = short(_SHORT.repr(value))  # a list that holds itself has no end
    kind = {str: "the text ", list: "the list ", dict: "the mapping ", int: "", float: ""}.get(type(value))
    return f"{type(value).__name__} {text}" if kind is None else kind + text


def check_plain(value: Any) -> None:
    """Raise ValueError where a value cannot be written into the files of a run and read back.

    It must be made of text, finite numbers, true, false, null, lists and mappings with text as keys, and end.

    >>> check_plain({"a": [1, float("inf")]})
    Traceback (most recent call last):
    ...
    ValueError: got inf in it, expected a finite number
    """
    left, seen = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        seen += 1
        if seen > _MOST_ITEMS or depth > _DEEPEST:
            raise ValueError(
                f"holds more than {_MOST_ITEMS:,} items or {_DEEPEST} levels, or itself: expected a value that fits a "
                "file"
            )
        inside = " in it" if depth else ""
        if isinstance(item, Mapping):
            left += [(part, depth + 1) for part in item.values()]
            for key in item:
                if not isinstance(key, str):
                    raise ValueError(f"got {describe(key)} as a key, expected text: put it in quotes")
        elif isinstance(item, (list, tuple)):
            left += [(part, depth + 1) for part in item]
        elif isinstance(item, int):
            _check_size(item)
        elif isinstance(item, float):
            if depth and not math.isfinite(item):
                raise ValueError(f"got {describe(item)}{inside}, expected a finite number")
        elif item is not None and not isinstance(item, str):
            raise ValueError(f"got {describe(item)}{inside}, expected text or a number: put it in quotes")


def _check_size(value: int) -> None:
    if abs(value) > _LARGEST:
        raise ValueError(f"got {describe(value)}, expected a number of at most {_LARGEST}")


def parse_annotation(node: ast.expr) -> tuple[frozenset[str], frozenset[str] | None, str | None]:
    """(kinds, kinds of a list's items, enumeration) of a dataclass annotation; an enumeration is text in
    YAML.

    >>> parse_annotation(ast.parse("list[float] | None", mode="eval").body)[1]
    frozenset({'float'})
    """
    if isinstance(node, ast.BinOp):
        left, left_item, left_enum = parse_annotation(node.left)
        right, right_item, right_enum = parse_annotation(node.right)
        return left | right, left_item or right_item, left_enum or right_enum
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return parse_annotation(ast.parse(node.value, mode="eval").body)
        return frozenset({type(node.value).__name__.replace("NoneType", "None")}), None, None
    if isinstance(node, ast.Subscript):
        return _parse_subscript(node)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "Any"
    if name in _NAMES or name == "Any":
        return frozenset({name}), None, None
    return frozenset({"str"}), None, name


def _parse_subscript(node: ast.Subscript) -> tuple[frozenset[str], frozenset[str] | None, str | None]:
    outer = node.value.id if isinstance(node.value, ast.Name) else ""
    if outer == "Optional":
        kinds, item, enum = parse_annotation(node.slice)
        return kinds | {"None"}, item, enum
    if outer == "Union" and isinstance(node.slice, ast.Tuple):
        parts = [parse_annotation(part) for part in node.slice.elts]
        kinds = frozenset().union(*(part[0] for part in parts))
        return kinds, next((p[1] for p in parts if p[1]), None), next((p[2] for p in parts if p[2]), None)
    if outer == "Literal":
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return frozenset().union(*({type(ast.literal_eval(v)).__name__} for v in values)), None, None
    if outer in ("list", "List"):
        return frozenset({"list"}), parse_annotation(node.slice)[0], None
    return frozenset({"dict" if outer in ("dict", "Dict") else "Any"}), None, None


class _Wrong:
    """The answer where a value is of no type that its key takes."""


_WRONG = _Wrong()


def _convert(value: Any, kinds: frozenset[str], choices: tuple[str, ...]) -> Any:
    if value is None:
        return None if "None" in kinds else _WRONG
    if isinstance(value, bool):
        return _convert_bool(value, kinds, choices)
    if isinstance(value, (int, float)):
        return _convert_number(value, kinds)
    if isinstance(value, str):
        if "str" in kinds:
            return value
        if kinds & {"int", "float"} and _NUMBER.fullmatch(value.strip()):
            return _convert_number(float(value), kinds)
        return [value] if "list" in kinds else _WRONG  # `lora_target_modules: all-linear`
    if "list" in kinds and isinstance(value, tuple):
        value = list(value)
    wanted = "list" if isinstance(value, list) else "dict" if isinstance(value, Mapping) else None
    return value if wanted in kinds else _WRONG


def _convert_bool(value: bool, kinds: frozenset[str], choices: tuple[str, ...]) -> Any:
    if "bool" in kinds:
        return value
    if not value and "no" in choices:  # YAML 1.1 reads a bare `no` as false
        return "no"
    return _WRONG


def _convert_number(value: int | float, kinds: frozenset[str]) -> Any:
    if isinstance(value, int):
        return value if kinds & {"int", "float"} else _WRONG
    if not math.isfinite(value):
        return _WRONG
    if "float" in kinds:
        return value
    if "int" not in kinds or value != int(value):
        return _WRONG
    _check_size(int(value))
    return int(value)


def suggest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean ...?``, or nothing where no known word is near.

    >>> suggest("num_rolouts", ["num_rollouts", "seed"])
    ' Did you mean num_rollouts?'
    """
    plain = {name.replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(word.replace("-", "_"), plain, n=1, cutoff=0.7)
    return f" Did you mean {plain[near[0]]}?" if near else ""


def listed(problems: Iterable[str], count: int, most: int = 5) -> str:
    """The first of many problems, a line each, and how many more there are.

    Args:
        problems: made one by one, as each may take a while (``suggest``).
        count: how many there are.

    >>> listed(iter(["a is wrong.", "b is wrong."]), 2, most=1)
    'a is wrong.\\n... and 1 more.'
    """
    lines = list(itertools.islice(problems, most))
    return "\n".join(lines + ([f"... and {count - len(lines)} more."] if count > len(lines) else []))
