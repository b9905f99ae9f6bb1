"""What the README and the pages show is true: every block runs, and files, commands, keys and figures exist."""

from __future__ import annotations

import csv
import doctest
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
from typer.main import get_command

from pods_rl.cli import app
from pods_rl.recipe.schema import fields

from .cli import pods

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results"


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each code block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


PYTHON = [code for language, code in blocks(README) if language == "python"]
SHELL = [code for language, code in blocks(README) if language == "" and "pods_rl/" not in code]


@pytest.mark.parametrize("code", PYTHON, ids=["trl", "select"])
def test_a_python_block_runs_as_it_stands(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 3
    else:
        assert "tensor([[0, 1, 2, 5]])" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pods_commands_run_one_after_the_other(tmp_path, monkeypatch):
    """As they stand, but for fewer seconds."""
    monkeypatch.chdir(tmp_path)
    commands = [words for code in SHELL for words in shown_commands(f"```\n{code}```\n")]
    assert len(commands) >= 5
    for words in commands:
        done = pods(*["3" if word == "20" else word for word in words])
        assert done.exit_code == 0, (words, done.output)
    assert Path("runs/first/report/report.html").is_file()
    assert Path("kept.jsonl").is_file()


def test_every_shell_block_is_one_that_a_test_knows():
    for code in SHELL:
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words[0] == "make":
                done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
            else:
                assert words[0] == "pods" or words == ["pip", "install", "."], line


PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
COMMANDS = get_command(app).commands
TAKE_KEYS = {"train", "compare", "eval", "plan", "doctor", "tasks"}  # the keys of a recipe are options of these


def shown_commands(text: str) -> list[list[str]]:
    """The words of each `pods` command in the code blocks of a page, without `pods`."""
    lines = "\n".join(code for _, code in blocks(text)).replace("\\\n", " ")
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


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page and page != "docs/verl.md"])
def test_shown_keys_exist(page):
    """`key: value` in a page is a key of a recipe."""
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = {key for span in re.findall(r"`(\w+: [^`\n]+)`", text) for key in re.findall(r"^(\w+): ", span)}
    assert shown <= set(fields())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target
    for path in re.findall(r"`(?:python )?((?:benchmarks|tests|examples)/[\w/]+\.\w+)", text):
        assert (ROOT / path).is_file(), path


def test_pages_that_the_source_names_exist():
    sources = [path for room in ("src", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")]
    named = {(page, path.name) for path in sources for page in re.findall(r"docs/[\w-]+\.md", path.read_text("utf-8"))}
    assert named
    assert [each for each in named if not (ROOT / each[0]).is_file()] == []


def test_no_address_is_made_up():
    """Until an owner confirms one, no file names a repository of ours or tells pip to fetch us from an index."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0"):
        if (
            name
            and name != "tests/test_readme.py"
            and Path(name).suffix in (".md", ".toml", ".cff", ".py", ".yaml", ".ipynb")
        ):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"(github|gitlab)\.com/pods|pip install ['\"]?pods-rl", text), name


def test_the_pages_are_eleven_and_short():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert len(pages) <= 11
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 12_000


def table(study: str, name: str) -> list[dict[str, str]]:
    with (RESULTS / study / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


ARMS = {
    "TRL's GRPO 16 (`exact_trl`)": "grpo-16-trl",
    "TRL's GRPO 16": "grpo-16-trl",
    "GRPO 16, `prefix_tree: false`": "grpo-16-off",
    "GRPO 16": "grpo-16",
    "PODS 64 -> 16, `prefix_tree: false`": "pods-64-16-off",
    "PODS 64 -> 16": "pods-64-16",
}


def numbers(texts: Iterable[str]) -> list[float]:
    """Without signs, because a page may turn a difference round."""
    return sorted(abs(float(text)) for text in texts)


@pytest.mark.parametrize(("study", "heading"), [("words", "Word problems"), ("levers", "Short sums")])
def test_the_tables_of_a_study_are_its_files(study, heading):
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    section = page.split(f"\n### {heading}\n")[1].split("\n### ")[0].split("| to an accuracy of")[0]
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    final = {row["arm"]: row for row in table(study, "final")}
    assert len(rows) >= 2 + 3
    for name, seconds, accuracy, *sooner in rows[2:]:
        found = final[ARMS[name]]
        ends = "{final:.3f} [{final_low:.3f}, {final_high:.3f}]"
        assert accuracy == ends.format_map({key: float(found[key]) for key in ("final", "final_low", "final_high")})
        assert float(seconds) == pytest.approx(float(found["seconds_per_step"]), abs=0.0006)
        for baseline, shown in zip(("grpo-16-trl", "grpo-16"), sooner, strict=False):
            rows_of_arm = [row for row in table(study, f"speedup-{baseline}") if row["arm"] == ARMS[name]]
            (row,) = (row for row in rows_of_arm if (row["criterion"], row["interpolated"]) == ("p99", "false"))
            speedup = float(row["speedup"])
            assert (0 if shown == "never" else float(shown.split()[0].strip("*"))) == round(speedup, 2)


def test_the_differences_that_the_pages_show_are_claims_of_the_studies():
    text = " ".join((README + (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")).split())
    shown = re.findall(r"(-?\d\.\d{3}) (?:above it |accuracy )?[[(](-?\d\.\d{3})(?:, | to )(-?\d\.\d{3})[])]", text)
    known = [numbers(["0.018", "0.051", "0.078"])]  # of the study with a tool, whose task and files are gone
    for study in ("words", "levers", "study"):
        known += [numbers(row[key] for key in ("difference", "ci_low", "ci_high")) for row in table(study, "claims")]
        known += [numbers(row[key] for key in ("final", "final_low", "final_high")) for row in table(study, "final")]
    unknown = [row for row in shown if not any(numbers(row) == pytest.approx(of, abs=6e-4) for of in known)]
    assert len(shown) > 15
    assert unknown == []


def test_the_crossings_that_the_pages_show_are_those_of_the_study():
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    crossings = {(row["accuracy"], row["of"]): row for row in table("words", "crossings") if row["against"] == "grpo-16"
                 and row["arm"] == "pods-64-16"}  # fmt: skip
    for level in ("0.5", "0.8"):
        (line,) = re.findall(rf"^\| {level} \| (.*) \|$", page, re.M)
        seconds, steps = crossings[level, "seconds"], crossings[level, "step"]
        for needs, shown in zip(("arm needs", "other needs"), line.split(" | "), strict=False):
            assert shown == f"{float(seconds[needs]):.1f} s, {float(steps[needs]):.0f} steps"
        intervals = [[f"{float(row[key]):.2f}" for key in ("ratio", "low", "high")] for row in (seconds, steps)]
        assert [re.findall(r"\d+\.\d+", cell) for cell in line.split(" | ")[2:]] == intervals
        value, low, high = intervals[0]
        assert f"{value} times to" in README
        assert f"({low} to {high}" in README


def test_the_sites_own_functions():
    names = runpy.run_path(str(ROOT / "docs" / "site.py"))
    tests = [doctest.DocTestFinder().find(names[name], name, globs=names) for name in ("relinked", "fenced")]
    results = [doctest.DocTestRunner().run(test) for (test,) in tests]
    assert [(result.failed, result.attempted > 0) for result in results] == [(0, True), (0, True)]


def test_the_file_tree_is_true():
    tree = README.split("```\nsrc/pods_rl/\n")[1].split("```")[0]
    for line in tree.splitlines():
        name = line.split()[0]
        home = ROOT / "src" / "pods_rl" if line.startswith("  ") else ROOT
        assert (home / name).exists(), name
