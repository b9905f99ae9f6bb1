"""The stubs that mypy reads instead of TRL and accelerate have names and parameters of the installed versions."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from trl import GRPOConfig, GRPOTrainer

from pods_rl.engines import TESTED
from pods_rl.engines.trl.compat import TRLTrainer

STUBS = Path(__file__).parents[2] / "stubs"
FILES = sorted(STUBS.rglob("*.pyi"))
# Set when an object is built; the stub of `accelerate` types the state that an Accelerator has.
INSTANCE_ONLY = {"GRPOConfig.fsdp_plugin_args", "AcceleratorState"}


def module_of(path: Path) -> Any:
    parts = path.relative_to(STUBS).with_suffix("").parts
    return importlib.import_module(".".join(part for part in parts if part != "__init__"))


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of the parameters that a stub gives one by one."""
    return [argument.arg for argument in function.args.args + function.args.kwonlyargs]


def members(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The classes, functions and names that a stub defines, and the members of its classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node


def found(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.skipif(trl.__version__ != TESTED["trl"], reason="the stubs are those of the version developed with")
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(STUBS)))
def test_the_functions_and_classes_of_a_stub_exist_and_take_its_parameters(path):
    module = module_of(path)
    for name, node in members(ast.parse(path.read_text(encoding="utf-8"))):
        if name in INSTANCE_ONLY:
            continue
        real = found(module, name)
        if not isinstance(node, ast.FunctionDef) or isinstance(real, property) or name.endswith("__init__"):
            continue
        names = list(inspect.signature(inspect.unwrap(real)).parameters)
        expected = parameters(node)
        assert names[: len(expected)] == expected, name


def test_the_fields_of_the_configuration_exist():
    tree = ast.parse((STUBS / "trl/__init__.pyi").read_text(encoding="utf-8"))
    (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig"]
    declared = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    assert declared - {field.name for field in dataclasses.fields(GRPOConfig)} - set(dir(GRPOConfig)) == set()


def test_the_methods_of_the_trainer_exist_and_take_these_parameters():
    declared = {name: method for name, method in vars(TRLTrainer).items() if inspect.isfunction(method)}
    assert declared
    for name, method in declared.items():
        given = inspect.signature(method).parameters.values()
        expected = [parameter.name for parameter in given if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        names = list(inspect.signature(inspect.unwrap(getattr(GRPOTrainer, name))).parameters)
        assert names[: len(expected)] == expected, name
