"""YAML as recipes are written in it: safe, no key twice, and every key with the line it stands on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError

_MOST_BYTES = 200_000  # the longest shipped experiment has 5 thousand
_MOST_NODES = 10_000  # keys, values and items, each alias counted as what it stands for
_DEEPEST = 40
_LONGEST_NUMBER = 400  # characters; Python converts a long one in quadratic time


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
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
            size = max(len(content), path.stat().st_size)
        if size > _MOST_BYTES:
            raise UserError(f"{path} has {size:,} bytes: expected a YAML recipe of {_MOST_BYTES:,} bytes at most.")
        text = content.decode("utf-8")
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
        values, node = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: {error.problem}. Expected `key: value` on each line.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        came = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{name}: holds {came}: expected `key: value` lines.")
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key.value, str)}
    for key in values:
        if not isinstance(key, str):
            raise UserError(f"{name}: the key {short(str(key))} is not text: put it in quotes if it is meant.")
    return values, Source(name, lines)


def parse_overrides(words: list[str]) -> dict[str, str | bool]:
    """``--key value``, ``--key=value`` and bare ``--flag`` (true) of the command line; the last one of a
    key wins.

    >>> parse_overrides(["--num-rollouts", "64", "--beta=0.04", "--use_cpu"])
    {'num_rollouts': '64', 'beta': '0.04', 'use_cpu': True}
    """
    overrides, stray = _split(words)
    if stray:
        raise UserError(f"Do not know what to do with {short(stray[0])!r}: expected --key value, as in --seed 1.")
    return overrides


def parse_words(words: list[str], config: str | None) -> tuple[str | None, dict[str, str | bool]]:
    """As parse_overrides, and the recipe: a word alone, where no option names it.

    >>> parse_words(["--seed", "1", "tiny-pods"], None)
    ('tiny-pods', {'seed': '1'})
    """
    overrides, stray = _split(words)
    if stray and config is None:
        config = stray.pop(0)
    if stray:
        raise UserError(
            f"Do not know what to do with {short(stray[0])!r}: expected --key value, as in --seed 1, beside the recipe "
            f"{short(config or '')}."
        )
    return config, overrides


def _split(words: list[str]) -> tuple[dict[str, str | bool], list[str]]:
    overrides: dict[str, str | bool] = {}
    stray, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            stray.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if equals:
            overrides[key] = value
        elif rest and not rest[0].startswith("--"):
            overrides[key] = rest.pop(0)
        else:
            overrides[key] = True
    return overrides, stray


def load_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML text, and its node; raises yaml.YAMLError for whatever is wrong with it."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_node(node, {}, set())
        return loader.construct_document(node), node
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML raises KeyError for `!!bool maybe`, AttributeError for `!!timestamp x`
        raise yaml.YAMLError(str(error) or type(error).__name__) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, bounded in time and memory."""

    _nodes = _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        if self._nodes > _MOST_NODES or self._depth > _DEEPEST:
            raise _refused(self.peek_event(), _TOO_DEEP if self._depth > _DEEPEST else _TOO_MUCH)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_TOO_DEEP = f"nests too deep (more than {_DEEPEST} levels)"
_TOO_MUCH = f"holds more than {_MOST_NODES:,} keys and values, each alias counted as what it stands for"


def _refused(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=place.start_mark)


def _check_node(node: yaml.Node, sizes: dict[yaml.Node, int], above: set[yaml.Node]) -> int:
    """The number of values below a node; raises where PyYAML would be silent, or would not come to an end.

    Args:
        sizes: those of nodes that were seen before: an alias is the same node again.
        above: the nodes that this one is in.
    """
    if node in above:
        raise _refused(node, "an alias refers to what it is in")
    if len(above) > _DEEPEST:
        raise _refused(node, _TOO_DEEP)
    if node in sizes:
        return sizes[node]
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    elif node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and len(node.value) > _LONGEST_NUMBER:
        raise _refused(node, f"a number of {len(node.value):,} characters: expected {_LONGEST_NUMBER} at most")
    size = 1
    for child in children:
        size += _check_node(child, sizes, above | {node})
        if size > _MOST_NODES:
            raise _refused(node, _TOO_MUCH)
    sizes[node] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise for two equal keys: PyYAML lets the last one win silently."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in seen:
            raise _refused(key, f"{short(key.value)} is there twice (first on line {seen[key.value]}): keep one")
        seen[key.value] = key.start_mark.line + 1


def local_path(name: str | Path) -> Path:
    """The path that a user's word names, whether or not something is there; UserError where it can name none."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, not allowed to look, ~nobody
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"{short(str(name))} cannot be a path: {reason}.") from error
    return path


def short(text: str, most: int = 60) -> str:
    """A text of a length that fits a message.

    >>> short("a" * 100, most=8)
    'aaaaa...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def dump_yaml(values: Mapping[str, Any]) -> str:
    """A mapping in the order given, so that parse_yaml reads back equal values."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=sys.maxsize)
