"""What the README shows runs, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_without_a_model_runs(capsys):
    (snippet,) = (found for found in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "select(" in found)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "tensor([[0, 1, 2, 5]])" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_point_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_commands_name_what_exists():
    for path in re.findall(r"`python (benchmarks/\w+\.py)", README):
        assert (ROOT / path).is_file(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_file_tree_is_true():
    tree = README.split("```\nsrc/pods_rl/\n")[1].split("```")[0]
    for line in tree.splitlines():
        name = line.split()[0]
        home = ROOT / "src" / "pods_rl" if line.startswith("  ") else ROOT
        assert (home / name).exists(), name
