"""TRL's and transformers' own configuration keys, read from their source: importing them takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from .fields import COMPUTED, Field, parse_annotation

# (package, file, class, section), base classes first: a later class replaces a field of an earlier one
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments", "engine"),
    ("trl", "trainer/base_config.py", "_BaseConfig", "engine"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig", "engine"),
    ("trl", "trainer/model_config.py", "ModelConfig", "model"),
)
_ENUMS = (("transformers", "training_args.py"), ("transformers", "trainer_utils.py"))


@cache
def trl_fields() -> dict[str, Field]:
    """Every field of GRPOConfig (with its bases) and ModelConfig that can be set, by name.

    Raises UserError where a package is missing or has moved the class.
    """
    enums: dict[str, tuple[str, ...]] = {}
    for package, file in _ENUMS:
        enums.update(_enumerations(_parse(package, file)))
    fields: dict[str, Field] = {}
    for package, file, name, section in _CLASSES:
        body = next((n for n in _parse(package, file).body if isinstance(n, ast.ClassDef) and n.name == name), None)
        if body is None:
            raise UserError(f"{package} has no class {name} in {file}: install trl 1.16 (tested).")
        for field in _fields_of(body, section, enums):
            fields[field.name] = field
    return fields


@cache
def _parse(package: str, file: str) -> ast.Module:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package} is not installed: run `pip install pods-rl`.")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise UserError(f"{package} has no file {file}: install trl 1.16 (tested).")
    return ast.parse(path.read_text(encoding="utf-8"))


def _fields_of(body: ast.ClassDef, section: str, enums: dict[str, tuple[str, ...]]) -> list[Field]:
    fields = []
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        options = _options(node.value)
        if node.target.id.startswith("_") or options.get("init") is False:
            continue
        kinds, item, enum = parse_annotation(node.annotation)
        metadata = options.get("metadata") or {}
        choices = metadata.get("choices") or enums.get(enum or "", ())
        fields.append(
            Field(
                name=node.target.id,
                kinds=kinds,
                default=options.get("default", COMPUTED),
                help=" ".join(str(metadata.get("help", "")).replace("%%", "%").split()),
                section=section,
                source=body.name,
                item=item,
                choices=tuple(choices) if isinstance(choices, (list, tuple)) else (),
            )
        )
    return fields


def _options(value: ast.expr | None) -> dict[str, Any]:
    """The keywords of ``field(...)``, or ``default`` alone where the value is written plainly."""
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


def _enumerations(module: ast.Module) -> dict[str, tuple[str, ...]]:
    found = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            members = [_literal(n.value) for n in node.body if isinstance(n, ast.Assign)]
            if members and all(isinstance(member, str) and member != COMPUTED for member in members):
                found[node.name] = tuple(members)
    return found
