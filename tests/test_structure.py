"""Imports point one way (docs/architecture.md), and what should be quick loads nothing heavy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pods_rl

ROOT = Path(pods_rl.__file__).parent
QUICK = tuple(f"pods_rl{room}" for room in ("", ".cli", ".recipe", ".runs", ".engines.trl.batching", ".experiment"))
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib", "pyarrow"}
LOW = {"distributed", "errors", "runs", "text"}
# room -> the rooms it may import; a room imports only rooms above its own line, so rooms form no circle
ALLOWED = {
    "errors": set(),
    "tables": set(),
    "text": {"errors"},
    "streams": {"text"},
    "yaml_files": {"errors", "text"},
    "runs": {"errors", "text", "yaml_files"},
    "selection": {"errors", "text"},
    "distributed": {"errors", "runs", "text"},
    "sandbox": {"distributed", "errors", "streams", "text"},
    "prefix_tree": {"errors", "selection"},
    "rewards": {"distributed", "errors", "sandbox", "text"},
    "tasks": {"errors", "rewards", "runs", "sandbox", "tables", "text", "yaml_files"},
    "engines": LOW | {"prefix_tree", "sandbox", "selection", "tables", "yaml_files"},
    "report": {"engines", "errors", "runs", "text"},
    "policies": set(),
    "recipe": {"engines", "errors", "policies", "text", "yaml_files"},
    "loading": {"errors", "policies", "prefix_tree", "recipe", "tasks", "text"},
    "evaluation": LOW | {"loading", "prefix_tree", "recipe", "sandbox", "tasks"},
    "training": LOW
    | {"engines", "evaluation", "loading", "policies", "prefix_tree", "recipe", "report", "rewards"}
    | {"sandbox", "streams", "tasks"},
    "planning": {"distributed", "engines", "errors", "loading", "policies", "prefix_tree", "recipe", "selection"}
    | {"training"},
    "experiment": LOW | {"recipe", "sandbox", "yaml_files"},
}  # fmt: skip
ROOT_MODULES = {"__init__", "__main__", "errors", "streams", "tables", "text", "yaml_files"}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module, which several tests walk."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(room: str) -> list[Path]:
    folder = ROOT / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{room}.py"]


def imported_rooms(path: Path) -> set[str]:
    """The rooms of ours that a module imports anywhere in its text."""
    package = ["pods_rl", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            names = [full] if full.count(".") else [f"{full}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("pods_rl.")}
    return found


def named_modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    parts = {path: ["pods_rl", *path.relative_to(ROOT).with_suffix("").parts] for path in ROOT.rglob("*.py")}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


def imported_modules(name: str, names: dict[str, Path]) -> set[str]:
    """The modules of ours that a module imports, at its head or inside a function."""
    package = name.split(".") if names[name].name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(parsed(names[name])):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{full}.{a.name}" if f"{full}.{a.name}" in names else full for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & set(names)) - {name}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_import_only_what_is_below_them(room):
    above = list(ALLOWED)[: list(ALLOWED).index(room)]
    assert modules(room)
    assert ALLOWED[room] <= set(above)
    for path in modules(room):
        assert imported_rooms(path) - {room} <= ALLOWED[room], path


def test_every_room_is_listed_and_the_root_holds_no_domain_module():
    assert {path.stem for path in ROOT.glob("*.py")} == ROOT_MODULES
    rooms = {path.name for path in ROOT.iterdir() if any(path.rglob("*.py"))}
    assert rooms == set(ALLOWED) - ROOT_MODULES | {"cli", "recipes"}


def test_no_modules_import_each_other_in_a_circle():
    names = named_modules()
    sorter = TopologicalSorter({name: imported_modules(name, names) for name in names})
    sorter.prepare()  # raises CycleError with the circle


def test_a_script_starts_below_all_that_it_uses():
    for path in ROOT.rglob("*.py"):
        body = parsed(path).body
        guards = [
            place
            for place, node in enumerate(body, 1)
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        ]
        assert guards in ([], [len(body)]), path


def test_nothing_imports_the_command_line():
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in ("cli", "__main__"):
            assert "cli" not in imported_rooms(path), path


def test_engines_never_import_each_other():
    engines = [path.name for path in (ROOT / "engines").iterdir() if (path / "__init__.py").is_file()]
    assert engines
    for engine in engines:
        for path in (ROOT / "engines" / engine).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for other in set(engines) - {engine}:
                assert f"engines.{other}" not in text, path
                assert f"from ..{other}" not in text, path


def test_engines_name_no_module_of_the_application_in_a_text():
    """A name in a text could be imported at run time, past the test of imports."""
    library = {"engines", *ALLOWED["engines"]}
    for path in (ROOT / "engines").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert set(re.findall(r"\bpods_rl\.(\w*)", node.value)) <= library, (path, node.lineno)


def test_only_the_trl_engine_imports_trls_trainers():
    for path in ROOT.rglob("*.py"):
        if "engines" in path.parts:
            continue
        tree = parsed(path)
        names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        assert not any(name == "trl.trainer" or name.startswith("trl.trainer.") for name in names), path


def test_the_library_of_an_engine_is_imported_by_that_engine_alone():
    owners = {"verl": "verl", "transfer_queue": "verl", "skyrl": "skyrl", "ray": "skyrl"}
    for path in ROOT.rglob("*.py"):
        tree = parsed(path)
        names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0}
        names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        for library in {name.split(".")[0] for name in names} & set(owners):
            assert path.is_relative_to(ROOT / "engines" / owners[library]), (path, library)


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


def test_help_loads_nothing_heavy():
    code = """
import sys
from pods_rl.cli import main
sys.argv = ["pods", "--help"]
try:
    main()
finally:
    print([name for name in %r if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code % (HEAVY,)], capture_output=True, text=True)
    assert "compare" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.slow
def test_selection_loads_torch_alone_and_a_training_script_only_the_library():
    selection, script = loaded_after("import pods_rl.selection", "from pods_rl import PODSTrainer")
    assert selection & HEAVY == {"torch"}
    ours = sorted(name for name in script if name.partition(".")[0] == "pods_rl")
    application = {"recipe", "planning", "tasks", "loading", "report", "rewards", "training", "evaluation", "cli"}
    assert [name for name in ours if application & set(name.split(".")[1:2])] == []
    assert len(ours) <= 42, ours
