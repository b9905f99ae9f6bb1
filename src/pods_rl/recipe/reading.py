"""Read recipes: YAML in files, ``--key value`` on the command line; keep the line of each key.

PyYAML and not ruamel.yaml: a stored ``run_name: 1e-5`` stays text, and the bounds below are needed with either.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml import YAMLError

from ..errors import UserError

_MOST_BYTES = 200_000  # the longest shipped experiment has 5 thousand
_MOST_NODES = 10_000  # keys, values and items, with each alias expanded
_DEEPEST = 40
_LONGEST_NUMBER = 400  # characters; Python converts a long one in quadratic time
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@dataclass(frozen=True)
class Origin:
    """The origin of values, for messages: a file with the line of each key, or only a name."""

    name: str
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Return ``recipe.yaml:3: `` for a key of a file, else ``name: ``."""
        return f"{self.name}:{self.lines[key]}: " if key in self.lines else f"{self.name}: "


def read_yaml(path: Path) -> tuple[dict[str, Any], Origin]:
    """Return the mapping in a file, and the line of each of its keys. Raises UserError for anything else."""
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


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Origin]:
    """Like read_yaml, for a string; ``name`` is the file's name in messages.

    >>> values, origin = parse_yaml("seed: 1\\nbeta: 0.04\\n", "my.yaml")
    >>> values, origin.where("beta")
    ({'seed': 1, 'beta': 0.04}, 'my.yaml:2: ')
    """
    try:
        values, node = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: {error.problem}. Expected `key: value` on each line.") from error
    except YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        held = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{name}: holds {held}: expected `key: value` lines.")
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key.value, str)}
    for key in values:
        if not isinstance(key, str):
            raise UserError(f"{name}: the key {short(str(key))} is not text: put it in quotes.")
    return values, Origin(name, lines)


def load_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text, and its node. Raises YAMLError if it is invalid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except YAMLError:
        raise
    except Exception as error:  # PyYAML raises KeyError for `!!bool maybe`, AttributeError for `!!timestamp x`
        raise YAMLError(str(error) or type(error).__name__) from error


class _Extent(NamedTuple):
    nodes: int
    depth: int


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, bounded in time and memory, which refuses duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._extents: dict[yaml.Node, _Extent] = {}  # of complete nodes, with each alias expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _too_deep(event)
        if len(self._extents) >= _MOST_NODES:
            raise _too_large(event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:
                raise _refused(event, "an alias contains itself")
        elif node is not None:
            self._extents[node] = self._measure(node)
        return node

    def _measure(self, node: yaml.Node) -> _Extent:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        elif node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            raise _refused(node, f"a number of {len(node.value):,} characters: expected {_LONGEST_NUMBER} at most")
        extents = [self._extents[child] for child in children]
        extent = _Extent(1 + sum(e.nodes for e in extents), 1 + max((e.depth for e in extents), default=0))
        if extent.nodes > _MOST_NODES:
            raise _too_large(node)
        if extent.depth > _DEEPEST:
            raise _too_deep(node)
        return extent


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise for two equal keys: PyYAML silently keeps the last one."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in seen:
            raise _refused(key, f"{short(key.value)} is a duplicate key (first on line {seen[key.value]}): keep one")
        seen[key.value] = key.start_mark.line + 1


def _too_deep(place: Any) -> yaml.MarkedYAMLError:
    return _refused(place, f"nested too deeply (more than {_DEEPEST} levels)")


def _too_large(place: Any) -> yaml.MarkedYAMLError:
    return _refused(place, f"holds more than {_MOST_NODES:,} keys and values, with each alias expanded")


def _refused(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=place.start_mark)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in the order given, such that parse_yaml returns equal values."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=sys.maxsize)


def parse_overrides(words: list[str], stray: list[str] | None = None) -> dict[str, str | bool]:
    """Read ``--key value``, ``--key=value`` and bare ``--flag`` (true); the last one of a key wins.

    Any other word goes into ``stray``, or raises UserError.

    >>> parse_overrides(["--num-rollouts", "64", "--beta=0.04", "--use_cpu"])
    {'num_rollouts': '64', 'beta': '0.04', 'use_cpu': True}
    """
    overrides: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--") or word == "--":
            if stray is None:
                raise UserError(f"Unexpected argument {short(word)!r}: expected --key value, as in --seed 1.")
            stray.append(word)
        elif equals:
            overrides[key] = value
        elif rest and not rest[0].startswith("--"):
            overrides[key] = rest.pop(0)
        else:
            overrides[key] = True
    return overrides


def parse_words(words: list[str], config: str | None) -> tuple[str | None, dict[str, str | bool]]:
    """Like parse_overrides, and return the recipe: a positional word, unless an option names it.

    >>> parse_words(["--seed", "1", "tiny-pods"], None)
    ('tiny-pods', {'seed': '1'})
    """
    stray: list[str] = []
    overrides = parse_overrides(words, stray)
    if stray and config is None:
        config = stray.pop(0)
    if stray:
        raise UserError(
            f"Unexpected argument {short(stray[0])!r}: expected --key value, as in --seed 1, after the recipe "
            f"{short(config or '')}."
        )
    return config, overrides


def local_path(name: str | Path) -> Path:
    """Return the path a user gave, whether or not it exists; raise UserError if it cannot be a path."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, no permission to look, ~nobody
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"{short(str(name))} cannot be a path: {reason}.") from error
    return path


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path: a hub id is ``name`` or ``owner/name``.

    >>> looks_like_path("./model"), looks_like_path("a/b/c"), looks_like_path("Qwen/Qwen2.5-0.5B")
    (True, True, False)
    """
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") > 1 or "\\" in name


def short(text: str, most: int = 60) -> str:
    """Return a text cut to a length that fits a message.

    >>> short("a" * 100, most=8)
    'aaaaa...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."
