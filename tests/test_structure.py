"""Imports point one way (docs/architecture.md), and what should be quick loads nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pods_rl

ROOT = Path(pods_rl.__file__).parent
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib", "pyarrow")
# room -> rooms of ours it may import; what is not listed here may import anything below the command line
ALLOWED = {
    "errors": set(),
    "text": {"errors"},
    "selection": {"errors", "text"},
    "runs": {"errors"},
    "distributed": {"errors", "runs", "text"},
    "rewards": {"distributed", "errors", "text"},
    "planning": {"distributed", "errors", "policies"},
    "recipe": {"errors", "planning", "policies"},
    "tasks": {"errors", "rewards", "text"},
    "experiment": {"distributed", "errors", "recipe", "runs"},
    "report": {"errors", "runs", "text"},
}  # fmt: skip


def modules(room: str) -> list[Path]:
    folder = ROOT / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{room}.py"]


def imported_rooms(path: Path) -> set[str]:
    """The rooms of ours that a module imports anywhere in its text."""
    package = ["pods_rl", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            names = [full] if full.count(".") else [f"{full}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("pods_rl.")}
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_import_only_what_is_below_them(room):
    assert modules(room)
    for path in modules(room):
        assert imported_rooms(path) - {room} <= ALLOWED[room], path


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


def test_only_the_trl_engine_imports_trls_trainers():
    for path in ROOT.rglob("*.py"):
        if "engines" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        assert not any(name == "trl.trainer" or name.startswith("trl.trainer.") for name in names), path


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Which heavy packages each import loads, from one fresh process per module."""
    code = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""
    names = (
        "pods_rl",
        "pods_rl.cli",
        "pods_rl.recipe",
        "pods_rl.runs",
        "pods_rl.planning.batching",
        "pods_rl.experiment",
    )
    names += ("pods_rl.report", "pods_rl.selection", "pods_rl.planning.memory")
    jobs = {
        name: subprocess.Popen([sys.executable, "-c", code, name, *HEAVY], stdout=subprocess.PIPE, text=True)
        for name in names
    }
    return {name: json.loads(job.communicate()[0]) for name, job in jobs.items()}


@pytest.mark.parametrize(
    "name",
    [
        "pods_rl",
        "pods_rl.cli",
        "pods_rl.recipe",
        "pods_rl.runs",
        "pods_rl.planning.batching",
        "pods_rl.experiment",
        "pods_rl.planning.memory",
    ],
)
def test_what_should_be_quick_loads_nothing_heavy(loaded, name):
    assert loaded[name] == []


def test_reports_load_no_torch(loaded):
    assert not {"torch", "transformers", "trl", "datasets"} & set(loaded["pods_rl.report"])


def test_selection_loads_torch_alone(loaded):
    assert set(loaded["pods_rl.selection"]) == {"torch"}


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
