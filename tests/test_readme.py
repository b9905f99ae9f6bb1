"""What the README and the pages show exists: files, commands and their options; the README's snippet runs."""

from __future__ import annotations

import doctest
import re
import runpy
import shlex
from pathlib import Path

import click
import pytest
from typer.main import get_command

from pods_rl.cli import app
from pods_rl.recipe.schema import fields

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_without_a_model_runs(capsys):
    (snippet,) = (found for found in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "select(" in found)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "tensor([[0, 1, 2, 5]])" in capsys.readouterr().out


PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
COMMANDS = get_command(app).commands
TAKE_KEYS = {"train", "compare", "eval", "plan", "doctor", "tasks"}  # the keys of a recipe are options of these


def shown_commands(text: str) -> list[list[str]]:
    """The words of each `pods` command in the code blocks of a page, without `pods`."""
    lines = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    found = re.findall(r"^(?:\$ |[A-Z_]+=\S+ )*pods +(.*)$", lines, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def unknown_words(words: list[str]) -> list[str]:
    """The command or the options of a command line that do not exist."""
    if words[0].startswith("-"):
        return []
    command = COMMANDS.get(words[0])
    if isinstance(command, click.Group) and len(words) > 1 and words[1] in command.commands:
        command = command.commands[words[1]]
    if command is None:
        return [words[0]]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    keys = {f"--{key}" for key in (*fields(), "seeds")} if words[0] in TAKE_KEYS else set()
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    return [option for option in given if option not in options | keys]


@pytest.mark.parametrize("page", PAGES)
def test_shown_commands_and_options_exist(page):
    for words in shown_commands((ROOT / page).read_text(encoding="utf-8")):
        assert unknown_words(words) == [], words


def test_a_stale_command_is_found():
    text = "```\n$ pods train x.yaml --rule a --outputs y  # note\npods tasks check a --data_dir b\npods trian a\n```\n"
    assert [unknown_words(words) for words in shown_commands(text)] == [["--outputs"], [], ["trian"]]


def test_the_sites_own_functions():
    names = runpy.run_path(str(ROOT / "docs" / "site.py"))
    tests = [doctest.DocTestFinder().find(names[name], name, globs=names) for name in ("relinked", "fenced")]
    results = [doctest.DocTestRunner().run(test) for (test,) in tests]
    assert [(result.failed, result.attempted > 0) for result in results] == [(0, True), (0, True)]


@pytest.mark.parametrize("page", PAGES)
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
