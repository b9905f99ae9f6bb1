"""YAML as recipes are written in it: safe, no key twice, and every key with the line it stands on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError

_MOST_BYTES = 1 << 20  # the longest shipped experiment has 5 thousand


@dataclass(frozen=True)
class Source:
    """Where values come from, for messages: a file with the line of each key, or a name alone."""

    name: str
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """``recipe.yaml:3: `` for a key of a file, else ``name: ``."""
        return f"{self.name}:{self.lines[key]}: " if key in self.lines else f"{self.name}: "


def read_yaml(path: Path) -> tuple[dict[str, Any], Source]:
    """The mapping a file holds, and where each of its keys stands. Raises UserError for anything else."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise UserError(f"{path} has {size:,} bytes: expected a YAML recipe of {_MOST_BYTES:,} bytes at most.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: expected a YAML recipe.") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Source]:
    """As read_yaml, of a text; ``name`` is what messages call it.

    >>> values, source = parse_yaml("seed: 1\\nbeta: 0.04\\n", "my.yaml")
    >>> values, source.where("beta")
    ({'seed': 1, 'beta': 0.04}, 'my.yaml:2: ')
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: {error.problem}. Expected `key: value` on each line.") from error
    except RecursionError as error:
        raise UserError(f"{name}: nests too deep, or is its own base: expected `key: value` lines.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: is not YAML: {error}".splitlines()[0]) from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        came = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{name}: holds {came}: expected `key: value` lines.")
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key.value, str)}
    for key in values:
        if not isinstance(key, str):
            raise UserError(f"{name}: the key {key!r} is no text: put it in quotes if it is meant.")
    return values, Source(name, lines)


def parse_overrides(words: list[str]) -> dict[str, str | bool]:
    """``--key value``, ``--key=value`` and bare ``--flag`` (true) of the command line; the last one of a
    key wins.

    >>> parse_overrides(["--num-rollouts", "64", "--beta=0.04", "--use_cpu"])
    {'num_rollouts': '64', 'beta': '0.04', 'use_cpu': True}
    """
    overrides: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"Do not know what to do with {word!r}: expected --key value, as in --seed 1.")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if equals:
            overrides[key] = value
        elif rest and not rest[0].startswith("--"):
            overrides[key] = rest.pop(0)
        else:
            overrides[key] = True
    return overrides


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which otherwise lets the last of two equal keys win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is there twice (first on line {seen[key.value]}): keep one",
                    problem_mark=key.start_mark,
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """A mapping in the order given, so that parse_yaml reads back equal values."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=sys.maxsize)
