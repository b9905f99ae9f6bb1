"""The configuration keys of TRL, transformers and PODSConfig, read from their source.

Parsed by hand: importing these classes takes many seconds and loads torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from .fields import COMPUTED, KINDS, Field

# (package, file, class, section), base classes first: a later class replaces a field of an earlier one
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments", "engine"),
    ("trl", "trainer/base_config.py", "_BaseConfig", "engine"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig", "engine"),
    ("trl", "trainer/model_config.py", "ModelConfig", "model"),
)


@cache
def trl_fields() -> dict[str, Field]:
    """Return every field of GRPOConfig (with its bases) and ModelConfig that can be set, by name.

    Raises UserError if a package is missing or lacks the class.
    """
    return {field.name: field for place in _CLASSES for field in _read_class(*place)}


@cache
def pods_fields() -> dict[str, Field]:
    """Return every field that PODSConfig adds to GRPOConfig, by name."""
    return {field.name: field for field in _read_class("pods_rl", "engines/trl/config.py", "PODSConfig", "engine")}


def parse_annotation(annotation: ast.expr | str) -> tuple[frozenset[str], frozenset[str] | None]:
    """Return the types that an annotation names, and those of a list's items. An enumeration is text in YAML.

    >>> parse_annotation("list[float] | None")[1]
    frozenset({'float'})
    """
    parts = list(_members(annotation))
    items = [part.slice for part in parts if isinstance(part, ast.Subscript) and _name(part.value) == "list"]
    return frozenset().union(*map(_kinds, parts)), parse_annotation(items[0])[0] if items else None


def _members(annotation: ast.expr | str) -> Iterator[ast.expr]:
    """The members of a union."""
    if isinstance(annotation, str):
        annotation = ast.parse(annotation, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        yield from _members(annotation.left)
        yield from _members(annotation.right)
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _members(annotation.value)
    elif isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Optional":
        yield from _members(annotation.slice)
        yield ast.Constant(None)
    else:
        yield annotation


def _kinds(part: ast.expr) -> frozenset[str]:
    if isinstance(part, ast.Constant):
        return frozenset({"None"})
    if isinstance(part, ast.Subscript):
        outer = _name(part.value)
        if outer == "Literal":
            values = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
            return frozenset(type(ast.literal_eval(value)).__name__ for value in values)
        return frozenset({outer if outer in ("list", "dict") else "Any"})
    name = _name(part)
    return frozenset({name if name in (*KINDS, "Any") else "str"})


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "Any"


@cache
def _parse(package: str, file: str) -> ast.Module:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package} is not installed: run `pip install .` in a checkout of pods-rl.")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise UserError(f"{package} has no file {file}: install trl 1.16 (tested).")
    return ast.parse(path.read_text(encoding="utf-8"))


def _read_class(package: str, file: str, name: str, section: str) -> Iterator[Field]:
    body = next((n for n in _parse(package, file).body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if body is None:
        raise UserError(f"{package} has no class {name} in {file}: install trl 1.16 (tested).")
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        options = _options(node.value)
        if node.target.id.startswith("_") or options.get("init") is False:
            continue
        kinds, item = parse_annotation(node.annotation)
        metadata = options.get("metadata") or {}
        choices = metadata.get("choices") or ()
        yield Field(
            name=node.target.id,
            kinds=kinds,
            default=options.get("default", COMPUTED),
            help=" ".join(str(metadata.get("help", "")).replace("%%", "%").split()),
            section=section,
            source=name,
            item=item,
            choices=tuple(choices) if isinstance(choices, (list, tuple)) else (),
        )


def _options(value: ast.expr | None) -> dict[str, Any]:
    """The keywords of ``field(...)``, or ``default`` alone if the value is a plain literal."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        return {word.arg: _literal(word.value) for word in value.keywords if word.arg}
    return {"default": _literal(value)}


def _literal(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Dict):
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return left + right if isinstance(left, str) and isinstance(right, str) else COMPUTED
    try:
        return ast.literal_eval(node) if node is not None else COMPUTED
    except ValueError:
        return COMPUTED
