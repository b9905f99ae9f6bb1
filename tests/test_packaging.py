"""What `pyproject.toml` declares is what the package imports: nothing is missing, nothing is installed in vain."""

import doctest
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

from tools import notes

import pods_rl

from .test_structure import ROOT, imported

PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
# verl pins older libraries than TRL needs, so it cannot be an extra; docs/engines.md says how to install it.
OF_VERL = {"verl", "omegaconf", "tensordict", "transfer_queue"}
OF_SKYRL = {"skyrl", "ray"}  # likewise; docs/engines.md
# Their modules are imported by TRL or transformers when a recipe asks for them, not by this package.
BY_OTHERS = {"vllm", "bitsandbytes", "deepspeed", "trackio"}
# Imported by a name in a string, when a recipe names its task.
BY_STRING = {"reasoning_gym"}
# The import names of distributions whose two names differ in more than a dash.
IMPORT_NAMES = {"pyyaml": "yaml"}


def import_name(requirement: str) -> str:
    """Return the name to import: `huggingface-hub>=1` gives `huggingface_hub`."""
    name = re.match(r"[\w.-]+", requirement).group()
    name = re.sub(r"[-_.]+", "_", name).lower()
    return IMPORT_NAMES.get(name, name)


@cache
def imported_packages() -> set[str]:
    """Return the top-level names that the source imports, at a module's head or in a function."""
    names = {name.partition(".")[0] for path in ROOT.rglob("*.py") for name in imported(path)}
    return names - set(sys.stdlib_module_names) - {"pods_rl"}


def declared() -> set[str]:
    return {import_name(requirement) for requirement in PROJECT["dependencies"]}


def optional() -> set[str]:
    names = set()
    for extra in ("vllm", "quant", "deepspeed", "reasoning-gym", "tracking"):
        names |= {import_name(requirement) for requirement in PROJECT["optional-dependencies"][extra]}
    return names


def test_every_imported_package_is_declared():
    assert imported_packages() - declared() - optional() - OF_VERL - OF_SKYRL == set()


def test_every_declared_package_is_imported():
    assert declared() - imported_packages() == set()


def test_every_extra_is_imported_or_belongs_to_a_library_that_imports_it():
    assert optional() - imported_packages() == BY_OTHERS | BY_STRING


def test_the_notes_of_a_release_are_those_of_its_version():
    assert doctest.testmod(notes).failed == 0
    headings = re.findall(r"^## (\S+) \((\S+)\)$", notes.CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0][0] == pods_rl.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", headings[0][1])
