"""The comparison of answers could be a package: it imports nothing of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pods_rl

ROOT = Path(pods_rl.__file__).parent
FOLDER = ROOT / "rewards" / "mathematics"


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
