"""The keys of a recipe: type, default and help of each, and the conversion of values from YAML or the command line.

The keys of TRL, transformers and PODSConfig are parsed from their source: importing these classes takes many seconds
and loads torch.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..text import describe, documented_arguments, short, suggest
from ..yaml_files import YAMLError, parse_value

COMPUTED = "(chosen at run time)"  # a default that is not a literal in the source
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "None": "null",
}
# package, file, class, part of a run; base classes first, since a later class replaces fields of an earlier one
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments", "engine"),
    ("trl", "trainer/base_config.py", "_BaseConfig", "engine"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig", "engine"),
    ("trl", "trainer/model_config.py", "ModelConfig", "model"),
)
_NUMBERS = frozenset(("int", "float"))
_TYPES = {"bool": bool, "str": str, "list": list, "dict": Mapping, "None": type(None)}  # besides numbers
_LARGEST = 2**63 - 1  # torch and the files of a run cannot hold larger integers
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Field:
    """A key of a recipe.

    Args:
        kinds: the YAML types it accepts (keys of `KINDS`, or ``Any``).
        section: the part of a run that reads this key: engine, model, task or run.
        source: the origin of its default.
        within: the interval of a number, as in ``(0, 1]``; a bracket includes its end. Empty: any number.
    """

    name: str
    kinds: frozenset[str]
    default: Any
    help: str
    section: str
    source: str
    choices: tuple[str, ...] = ()
    within: str = ""

    @property
    def expected(self) -> str:
        """The accepted values, in words.

        >>> Field("x", frozenset({"float", "None"}), None, "", "run", "").expected
        'a number or null'
        """
        if self.choices and self.kinds <= {"str", "list", "None"}:
            return f"one of {', '.join(self.choices)}{' or null' if 'None' in self.kinds else ''}"
        return "anything" if "Any" in self.kinds else " or ".join(KINDS[kind] for kind in KINDS if kind in self.kinds)

    def convert(self, value: Any) -> Any:
        """Return the value as this key's type; raise ValueError (what was given, what was expected) if it has another.

        Numbers written as text are read as numbers: YAML 1.1 reads ``1e-6`` as text, and its meaning is clear.

        >>> Field("learning_rate", frozenset({"float"}), 1e-6, "", "engine", "").convert("1e-6")
        1e-06
        """
        if not _is_plain(value):
            raise ValueError(f"got {describe(value)}, expected finite numbers and text in it, and text as keys.")
        try:
            converted = value if "Any" in self.kinds else _convert(value, self.kinds)
        except TypeError:
            raise ValueError(f"got {describe(value)}, expected {self.expected}.") from None
        if self.choices and isinstance(converted, str) and converted not in self.choices:
            raise ValueError(f"got {describe(value)}.{suggest(converted, self.choices)} Expected {self.expected}.")
        if self.within and isinstance(converted, (int, float)) and not _inside(converted, self.within):
            raise ValueError(f"got {converted}, expected a number in {self.within}.")
        return converted

    def parse(self, text: str) -> Any:
        """Return the value of a command-line word, read as YAML unless the key accepts only text.

        >>> Field("seeds", frozenset({"list"}), None, "", "run", "").parse("[1, 2]")
        [1, 2]
        """
        if self.kinds <= {"str"}:
            return self.convert(text)
        try:
            value = parse_value(text)
            if "str" in self.kinds:  # `--run_name 12` is a name, `--run_name #1` is not a comment
                _convert(value, self.kinds - {"str"})
                if value is None and text.strip() not in ("null", "~"):
                    value = text
        except (YAMLError, TypeError):
            value = text
        return self.convert(value)


def _convert(value: Any, kinds: frozenset[str]) -> Any:
    """Return the value as one of these types, or raise TypeError."""
    if isinstance(value, str) and "str" not in kinds and kinds & _NUMBERS and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer() and "float" not in kinds:
        value = int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        in_range = abs(value) <= _LARGEST if isinstance(value, int) else math.isfinite(value) and "float" in kinds
        if in_range and kinds & _NUMBERS:
            return value if "int" in kinds else float(value)  # transformers refuses `repetition_penalty: 1`
    for kind, its_type in _TYPES.items():
        if kind in kinds and isinstance(value, its_type):
            return value
    if "list" in kinds and isinstance(value, (str, tuple)):
        return [value] if isinstance(value, str) else list(value)  # `lora_target_modules: all-linear`
    if value is False and "str" in kinds:  # YAML 1.1 reads a bare `no` as false
        return "no"
    raise TypeError


def _is_plain(value: Any) -> bool:
    """Return whether the files of a run can hold a value: a list or mapping of finite numbers and text."""
    try:
        return isinstance(value, (float, type(None))) or json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):  # a date, infinity, itself
        return False


def _inside(value: float, interval: str) -> bool:
    """Return whether a number lies in an interval; a bracket includes its end, a parenthesis does not."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


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
        else:
            overrides[key] = rest.pop(0) if rest and not rest[0].startswith("--") else True
    return overrides


@cache
def trl_fields() -> dict[str, Field]:
    """Return every field of GRPOConfig (with its bases) and ModelConfig, by name."""
    return {field.name: field for place in _CLASSES for field in _read_class(*place)}


@cache
def pods_fields() -> dict[str, Field]:
    """Return every field that PODSConfig adds to GRPOConfig, by name."""
    return {field.name: field for field in _read_class("pods_rl", "engines/trl/config.py", "PODSConfig", "engine")}


def parse_annotation(annotation: str) -> frozenset[str]:
    """Return the types that an annotation names. An enumeration is text in YAML.

    >>> sorted(parse_annotation("list[float] | None"))
    ['None', 'list']
    """
    parts = [part.strip().replace("Literal[False]", "bool") for part in annotation.split("|")]
    names = [part.partition("[")[0] for part in parts]
    return frozenset(name if name in (*KINDS, "Any") else "str" for name in names)


def _read_class(package: str, file: str, name: str, section: str) -> Iterator[Field]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    documented = documented_arguments(ast.get_docstring(found) or "")
    for node in found.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        options = {"default": _literal(node.value)}
        if isinstance(node.value, ast.Call):  # field(...)
            options = {word.arg or "": _literal(word.value) for word in node.value.keywords}
        if node.target.id.startswith("_") or options.get("init") is False:
            continue
        metadata = options.get("metadata") or {}
        choices = metadata.get("choices") or ()
        yield Field(
            name=node.target.id,
            kinds=parse_annotation(ast.unparse(node.annotation)),
            default=options.get("default", COMPUTED),
            help=" ".join(str(metadata.get("help", documented.get(node.target.id, ""))).replace("%%", "%").split()),
            section=section,
            source=name,
            choices=tuple(choices) if isinstance(choices, (list, tuple)) else (),
        )


def _literal(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Dict):
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    try:
        return ast.literal_eval(node) if node is not None else COMPUTED
    except ValueError:
        return COMPUTED
