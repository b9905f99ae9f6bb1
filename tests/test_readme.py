"""What the README and the pages show is true: every block runs, and files, commands, keys and figures exist."""

import doctest
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import click
import griffe
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.main import get_command

from pods_rl.cli.commands import app
from pods_rl.recipe.schema import fields, trl_fields

from . import read_csv
from .cli import pods

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page and page != "docs/engines.md"])
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
    for path in re.findall(r"`(?:python )?((?:benchmarks|tools|tests|examples)/[\w/]+\.\w+)", text):
        assert (ROOT / path).is_file(), path


def test_pages_that_the_source_names_exist():
    sources = [path for room in ("src", "benchmarks", "tools", "examples") for path in (ROOT / room).rglob("*.py")]
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


def test_the_scores_of_the_first_screen_are_those_of_the_study():
    scores = {}
    for row in read_csv(ROOT / "docs" / "results" / "batch_words_16" / "comparisons.csv"):
        if row["measure"] == "accuracy over time":
            scores[row["arm"]] = f"{100 * float(row['arm_value']):.0f} %"
            scores[row["rival"]] = f"{100 * float(row['rival_value']):.0f} %"
    first_screen = " ".join(README.partition("make quickstart")[0].split())
    shown = {"trl-16": "with TRL's GRPO", "grpo-16": "with shared prefixes", "batch-4x16": "with selection too"}
    for arm, words in shown.items():
        assert f"**{scores[arm]}** {words}" in first_screen


def test_the_first_screen_has_at_most_150_words_before_its_commands():
    first_screen = README.partition("\n")[2].partition("```")[0]
    without_figure = re.sub(r"!\[[^\]]*\]", "", first_screen)
    without_addresses = re.sub(r"\]\([^)]*\)", "]", without_figure)
    assert len(without_addresses.split()) <= 150


SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))


@pytest.mark.parametrize("name", ["relinked", "fenced", "group_of", "entry", "escaped"])
def test_the_sites_own_functions(name):
    (test,) = doctest.DocTestFinder().find(SITE[name], name, globs=SITE)
    result = doctest.DocTestRunner().run(test)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_the_page_of_keys_has_every_key_with_its_meaning():
    """The site fills it from the installed versions, as `pods train --explain` does."""
    page = SITE["with_keys"]((ROOT / "docs" / "keys.md").read_text(encoding="utf-8"))
    entries = re.findall(r"^### `(\w+)`\n\n(.+)\n\n(.+)$", page, flags=re.MULTILINE)
    names = [name for name, _, _ in entries]
    assert sorted(names) == sorted(fields())
    for name, facts, meaning in entries:
        assert "Default: " in facts, name
        assert len(meaning.split()) >= (1 if name in trl_fields() else 3), name  # TRL's is "LoRA alpha."
    for heading in ("PODS", "Task and data", "Evaluation", "Run", "TRL: the policy", "TRL: GRPO"):
        assert f"\n## {heading}\n" in page


def test_an_entry_of_the_reference_has_the_first_sentence_of_its_docstring():
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    loader.load("pods_rl")
    loader.resolve_aliases(implicit=True)
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text("utf-8")
        entries = re.findall(r"^::: (\S+)\n(?:    .+\n)*\n> (.+)$", text, re.MULTILINE)
        assert len(entries) == text.count("\n::: ")
        for name, sentence in entries:
            docstring = loader.modules_collection[name].docstring
            assert sentence == " ".join(docstring.value.partition("\n\n")[0].split()), name


def test_the_page_of_keys_names_those_of_pods_in_a_checkout():
    page = (ROOT / "docs" / "keys.md").read_text("utf-8")
    for names, group in re.findall(r"^> (.+)\n\n<!-- keys: (\w+) -->", page, re.MULTILINE):
        of_group = [name for name, field in fields().items() if SITE["group_of"](field) == group]
        assert re.findall(r"`(\w+)`", names) == of_group
    assert page.count("\n> `") == 4


def test_the_file_tree_is_true_and_has_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("```\nsrc/pods_rl/\n")[1].split("```")[0]
    packages = set()
    for line in tree.splitlines():
        name = line.split()[0]
        home = ROOT
        if line.startswith("  "):
            home = ROOT / "src" / "pods_rl"
            packages.add(name.partition("/")[0])
        assert (home / name).exists(), name
    assert packages == {path.parent.name for path in (ROOT / "src" / "pods_rl").glob("*/__init__.py")}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8").partition("\n## Tested\n")[2]
DISTRIBUTIONS = {"torch": "torch", "transformers": "transformers", "TRL": "trl", "vLLM": "vllm", "verl": "verl"} | {
    "SkyRL": "skyrl"
}


def version_rows() -> list[dict[str, str]]:
    """The rows of the table of versions, each by the column's name, without columns that are not installed."""
    header, _, *lines = [line for line in VERSIONS.splitlines() if line.startswith("|")]
    names = header.strip("| ").split(" | ")
    rows = []
    for line in lines:
        cells = line.strip("| ").split(" | ")
        rows.append({name: cell for name, cell in zip(names, cells, strict=True) if cell != "-"})
    return rows


def allowed_versions() -> dict[str, SpecifierSet]:
    """What pyproject.toml asks for, by the name of a distribution."""
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["vllm"]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, wanted)}


def pinned(file: str) -> dict[str, str]:
    """The version of each distribution in a file of constraints."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name.removesuffix("-cpu"): version for name, version in found}


@pytest.mark.parametrize("column", ["transformers", "TRL", "vLLM"])
def test_the_newest_minor_version_that_may_be_installed_was_run(column):
    """An upper bound is the minor version after it."""
    allowed = allowed_versions()[DISTRIBUTIONS[column]]
    (bound,) = [Version(each.version) for each in allowed if each.operator == "<"]
    run = [Version(row[column]) for row in version_rows() if column in row]
    newest = max(run)
    assert (newest.major, newest.minor + 1) == (bound.major, bound.minor)


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-verl.txt", "constraints-vllm.txt"])
def test_each_pinned_environment_is_a_row_of_the_table(file):
    versions = pinned(file)
    row = {column: versions[name] for column, name in DISTRIBUTIONS.items() if name in versions}
    if file == "constraints-verl.txt":
        assert "TRL" not in row
    assert row in version_rows()


def test_other_texts_name_the_pinned_versions():
    """The README's sentence has what constraints.txt pins, and docs/trl.md the vLLM of its test."""
    sentences = re.findall(r"Tested with\s+(.*?)\(`constraints\.txt`\)", README, flags=re.DOTALL)
    versions = pinned("constraints.txt")
    for sentence in sentences:
        named = re.findall(r"(TRL|transformers|torch) (\d[\d.]*\d)", sentence)
        assert len(named) == 3
        for column, version in named:
            assert f"{versions[DISTRIBUTIONS[column]]}.".startswith(f"{version}."), (column, version)
    (vllm,) = re.findall(r"evaluates with vLLM (\S+) on a CPU", (ROOT / "docs" / "on-a-gpu.md").read_text("utf-8"))
    assert vllm == pinned("constraints-vllm.txt")["vllm"]


def test_the_python_versions_agree():
    minors = [int(each[1]) for each in re.findall(r"(:: 3\.)(\d+)", "\n".join(PROJECT["classifiers"]))]
    lowest, highest = min(minors), max(minors)
    assert PROJECT["requires-python"] == f">=3.{lowest}"
    assert f"Python 3.{lowest} to 3.{highest}" in README
    assert f"Python 3.{lowest} or later" in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("column", ["torch", "transformers", "TRL"])
def test_the_oldest_version_that_may_be_installed_was_run(column):
    run = [Version(row[column]) for row in version_rows() if "TRL" in row and column in row]
    allowed = allowed_versions()[DISTRIBUTIONS[column]]
    assert [min(run)] == [Version(each.version) for each in allowed if each.operator == ">="]


def test_the_readme_names_the_oldest_and_the_newest_versions_that_were_run():
    sentence = re.search(r"oldest versions that are tested are(.*?)newest are(.*?)\(\[all\]", README, flags=re.DOTALL)
    for column in ("transformers", "torch"):
        run = [Version(row[column]) for row in version_rows() if "TRL" in row]
        for text, version in zip(sentence.groups(), (min(run), max(run)), strict=True):
            assert f"{column} {version.major}.{version.minor}" in text
