"""The comparison of answers could be a package: it imports nothing of ours, and others import its door alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pods_rl

ROOT = Path(pods_rl.__file__).parent
FOLDER = ROOT / "rewards" / "mathematics"
INSIDE = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}


def imports(path: Path) -> list[tuple[int, str]]:
    """The imports of a module: how many dots each begins with, and its dotted name with what is imported."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names += [(node.level, f"{node.module or ''}.{alias.name}".lstrip(".")) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
    return names


def test_it_imports_nothing_of_ours():
    for path in FOLDER.glob("*.py"):
        for dots, name in imports(path):
            assert dots <= 1, (path, name)
            assert not name.startswith("pods_rl"), (path, name)


def test_others_import_its_door_alone():
    users = set()
    for folder in (ROOT, ROOT.parents[1] / "benchmarks", ROOT.parents[1] / "examples"):
        for path in folder.rglob("*.py"):
            if path.parent == FOLDER:
                continue
            for _, name in imports(path):
                _, door, rest = name.partition("mathematics.")
                if door:
                    users.add(path.stem)
                    assert rest.split(".")[0] not in INSIDE, (path, name)
    assert {"answers", "chemistry", "extraction", "graded", "verifier"} <= users
