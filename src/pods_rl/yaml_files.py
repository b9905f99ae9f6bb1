"""Read and write YAML: safe tags only, bounded in size, and with the line of each key for messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml import YAMLError as YAMLError

from .errors import UserError
from .text import short

_MOST_BYTES = 200_000  # the longest shipped experiment has 5 thousand
_MOST_NODES = 10_000  # keys, values and items, with each alias expanded


@dataclass(frozen=True)
class Origin:
    """The origin of values, for messages: a file with the line of each key, or only a name."""

    name: str
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Return ``recipe.yaml:3: `` for a key of a file, else ``name: ``."""
        return f"{self.name}:{self.lines[key]}: " if key in self.lines else f"{self.name}: "


def read_yaml(path: Path) -> tuple[dict[str, Any], Origin]:
    """Return the mapping in a file, and the line of each of its keys.

    Raises UserError for anything else; a pipe, which may block, and a large file are not opened.
    """
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _MOST_BYTES):
            raise UserError(f"{path}: expected a YAML file of at most {_MOST_BYTES:,} bytes.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: expected a YAML file.") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Origin]:
    """Like read_yaml, for a string; ``name`` is the file's name in messages.

    >>> values, origin = parse_yaml("seed: 1\\nbeta: 0.04\\n", "my.yaml")
    >>> values, origin.where("beta")
    ({'seed': 1, 'beta': 0.04}, 'my.yaml:2: ')
    """
    try:
        values, node = _load(text)
    except yaml.MarkedYAMLError as error:
        place = name
        mark = error.problem_mark or error.context_mark
        if mark:
            place = f"{name}:{mark.line + 1}"
        raise UserError(f"{place}: {error.problem}. Expected `key: value` on each line.") from error
    except YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        held = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{name}: holds {held}: expected `key: value` lines.")
    for key in values:
        if not isinstance(key, str):
            raise UserError(f"{name}: the key {short(str(key))} is not text: put it in quotes.")
    return values, Origin(name, {key.value: key.start_mark.line + 1 for key, _ in node.value})


def parse_value(text: str) -> Any:
    """Return the value of a YAML text, such as a word of the command line; raise YAMLError if it is not valid.

    >>> parse_value("[1, 2.5]")
    [1, 2.5]
    """
    value, _ = _load(text)
    return value


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in the order given, such that parse_yaml returns equal values."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=sys.maxsize)


def _load(text: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a text and its node. PyYAML raises KeyError for `!!bool maybe`, and more of that kind."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check(node, {})
        return loader.construct_document(node), node
    except YAMLError:
        raise
    except RecursionError as error:
        raise YAMLError("nested too deeply") from error
    except Exception as error:
        raise YAMLError(str(error) or type(error).__name__) from error


def _check(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of nodes in one, with each alias expanded.

    `sizes` has the number of each node that was counted, by its identity, and 0 while it is being counted.

    Raises MarkedYAMLError for too many nodes, an alias that contains itself, and duplicate keys, of which PyYAML
    silently keeps the last one.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise _refused("an alias contains itself", node)
        return sizes[id(node)]
    sizes[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        for key, value in node.value:
            children += (key, value)
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1
    for child in children:
        size += _check(child, sizes)
        if size > _MOST_NODES:
            raise _refused(f"holds more than {_MOST_NODES:,} keys and values, with each alias expanded", node)
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise MarkedYAMLError for a duplicate key. `<<`, which merges another mapping, may be repeated."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in lines:
            first = f"first on line {lines[key.value]}"
            raise _refused(f"{short(key.value)} is a duplicate key ({first}): keep one", key)
        lines[key.value] = key.start_mark.line + 1


def _refused(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
