"""Imports point one way (docs/architecture.md), what should be quick loads nothing heavy, and all is declared."""

import ast
import doctest
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from tools import notes

import pods_rl

ROOT = Path(pods_rl.__file__).parent
QUICK = tuple(
    f"pods_rl{room}" for room in ("", ".cli.commands", ".recipe", ".runs", ".engines.trl.batching", ".experiment")
)
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib", "pyarrow"}
LOW = {"distributed", "errors", "masking", "runs", "text"}
# room -> the rooms it may import; a room imports only rooms above its own line, so rooms form no circle
ALLOWED = {
    "errors": set(),
    "masking": set(),
    "tables": set(),
    "text": {"errors"},
    "streams": set(),
    "yaml_files": {"errors", "text"},
    "runs": {"errors", "masking", "text", "yaml_files"},
    "sums": set(),
    "selection": {"errors", "sums", "text"},
    "distributed": {"errors", "runs", "text"},
    "sandbox": {"distributed", "errors", "streams", "text"},
    "prefix_tree": {"errors", "sums"},
    "rewards": {"distributed", "errors", "sandbox", "text"},
    "tasks": {"errors", "rewards", "runs", "sandbox", "tables", "text", "yaml_files"},
    "engines": LOW | {"prefix_tree", "sandbox", "selection", "tables", "yaml_files"},
    "report": {"engines", "errors", "runs", "text"},
    "policies": set(),
    "recipe": {"engines", "errors", "masking", "policies", "runs", "text", "yaml_files"},
    "loading": {"errors", "policies", "prefix_tree", "recipe", "runs", "tasks", "text"},
    "evaluation": LOW | {"loading", "prefix_tree", "recipe", "sandbox", "tasks"},
    "training": LOW
    | {"engines", "evaluation", "loading", "policies", "prefix_tree", "recipe", "report", "rewards"}
    | {"sandbox", "streams", "tasks"},
    "planning": {"distributed", "engines", "errors", "loading", "policies", "prefix_tree", "recipe", "selection"}
    | {"training"},
    "experiment": LOW | {"recipe", "sandbox", "yaml_files"},
}  # fmt: skip
ROOT_MODULES = {"__init__", "__main__", "errors", "masking", "streams", "sums", "tables", "text", "yaml_files"}


@cache
def imported(path: Path) -> frozenset[str]:
    """The dotted name of all that a module imports, at its head or inside a function."""
    package = ["pods_rl", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{full}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def modules(room: str) -> list[Path]:
    folder = ROOT / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{room}.py"]


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_import_only_what_is_below_them(room):
    above = list(ALLOWED)[: list(ALLOWED).index(room)]
    assert modules(room)
    assert ALLOWED[room] <= set(above)
    for path in modules(room):
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("pods_rl.")}
        assert rooms - {room} <= ALLOWED[room], path


def test_every_room_is_listed_and_the_root_holds_no_domain_module():
    assert {path.stem for path in ROOT.glob("*.py")} == ROOT_MODULES
    rooms = {path.name for path in ROOT.iterdir() if any(path.rglob("*.py"))}
    assert rooms == set(ALLOWED) - ROOT_MODULES | {"cli", "recipes"}


def test_no_modules_import_each_other_in_a_circle():
    parts = {path: ["pods_rl", *path.relative_to(ROOT).with_suffix("").parts] for path in ROOT.rglob("*.py")}
    names = {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}

    def ours(name: str) -> set[str]:
        found = imported(names[name])
        return {target if target in names else target.rpartition(".")[0] for target in found} & names.keys() - {name}

    sorter = TopologicalSorter({name: ours(name) for name in names})
    sorter.prepare()  # raises CycleError with the circle


def test_the_comparison_of_answers_could_be_a_package():
    """It imports nothing else of ours."""
    for path in (ROOT / "rewards/mathematics").glob("*.py"):
        ours = [name for name in imported(path) if name.startswith("pods_rl")]
        assert all(name.startswith("pods_rl.rewards.mathematics.") for name in ours), path


def test_engines_never_import_each_other():
    folder = ROOT / "engines"
    engines = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
    assert engines
    for path in folder.rglob("*.py"):
        found = {name.split(".")[2] for name in imported(path) if name.startswith("pods_rl.engines.")}
        assert found & engines <= {path.relative_to(folder).parts[0]}, path


TRL_ENGINE = ROOT / "engines/trl"


def names_below(path: Path, package: str) -> set[str]:
    """The modules and folders of a package that a module imports."""
    return {name.removeprefix(f"{package}.").split(".")[0] for name in imported(path) if name.startswith(f"{package}.")}


def test_the_layers_of_the_trainer_do_not_import_each_other():
    layers = {"selecting", "step", "guarded"}
    assert layers == {path.parent.name for path in TRL_ENGINE.glob("*/trainer.py")}
    for layer in layers:
        for path in (TRL_ENGINE / layer).rglob("*.py"):
            assert names_below(path, "pods_rl.engines.trl") & layers <= {layer}, path
    for path in set(TRL_ENGINE.glob("*.py")) - {TRL_ENGINE / "__init__.py", TRL_ENGINE / "trainer.py"}:
        assert not names_below(path, "pods_rl.engines.trl") & layers, path
    for path in (TRL_ENGINE / "selecting").rglob("*.py"):
        assert "prefix_tree" not in names_below(path, "pods_rl"), path


def test_a_reader_of_pods_meets_few_lines():
    """The layer that selects, and what it imports of the engine, with what these import of it."""
    found: set[Path] = set()
    waiting = {TRL_ENGINE / "selecting/trainer.py"}
    while waiting:
        path = waiting.pop()
        found.add(path)
        for name in imported(path):
            module = ROOT.parent.joinpath(*name.split("."))
            for candidate in (module.with_suffix(".py"), module.parent.with_suffix(".py")):
                if candidate.is_relative_to(TRL_ENGINE) and candidate.is_file() and candidate not in found:
                    waiting.add(candidate)
    lines = {str(path.relative_to(TRL_ENGINE)): len(path.read_text().splitlines()) for path in found}
    assert "compat.py" in lines
    assert "selecting/generation.py" in lines
    assert sum(lines.values()) <= 2300, lines


@pytest.mark.parametrize(
    ("library", "owner"),
    [
        ("trl.trainer", "engines"),
        ("verl", "engines/verl"),
        ("transfer_queue", "engines/verl"),
        ("skyrl", "engines/skyrl"),
        ("ray", "engines/skyrl"),
        ("pods_rl.cli", "cli"),
    ],
)
def test_one_folder_alone_imports_a_library(library, owner):
    users = {
        path for path in ROOT.rglob("*.py") if any(f"{name}.".startswith(f"{library}.") for name in imported(path))
    }
    assert {path for path in users if not path.is_relative_to(ROOT / owner)} <= {ROOT / "__main__.py"}


def loaded_after(*statements: str) -> list[set[str]]:
    """Run statements in a fresh process; return the names of the modules that are loaded after each."""
    code = "import json, sys\n"
    for statement in statements:
        code += f"{statement}\nprint(json.dumps(sorted(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_what_should_be_quick_loads_nothing_heavy():
    *quick, report = loaded_after(*(f"import {name}" for name in (*QUICK, "pods_rl.report")))
    for name, loaded in zip(QUICK, quick, strict=True):
        assert loaded & HEAVY == set(), name
    assert report & HEAVY <= {"pyarrow"}


@pytest.mark.slow
def test_selection_loads_torch_alone_and_a_training_script_only_the_library():
    selection, script = loaded_after("import pods_rl.selection", "from pods_rl import PODSTrainer")
    assert selection & HEAVY == {"torch"}
    ours = sorted(name for name in script if name.partition(".")[0] == "pods_rl")
    application = {"recipe", "planning", "tasks", "loading", "report", "rewards", "training", "evaluation", "cli"}
    assert [name for name in ours if application & set(name.split(".")[1:2])] == []
    assert len(ours) <= 59, ours  # the three folders of the TRL engine and the rules over a batch among them


# -- what pyproject.toml declares is what the package imports ---------------------------------------------------------

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


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    assert imported_packages() - declared() - optional() - OF_VERL - OF_SKYRL == set()
    assert declared() - imported_packages() == set()
    assert optional() - imported_packages() == BY_OTHERS | BY_STRING


def test_the_notes_of_a_release_are_those_of_its_version():
    assert doctest.testmod(notes).failed == 0
    headings = re.findall(r"^## (\S+) \((\S+)\)$", notes.CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0][0] == pods_rl.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", headings[0][1])
