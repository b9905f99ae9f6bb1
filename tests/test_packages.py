"""Rules and tasks of other packages: as installed, by name, and what is said of one that fails."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from pods_rl.errors import UserError
from pods_rl.recipe import Origin, build_recipe
from pods_rl.recipe.contents import contents_of, module_hashes
from pods_rl.runs.identity import changed_contents
from pods_rl.runs.sources import user_sources
from pods_rl.selection import RULES, get_rule, select
from pods_rl.selection.rules import check_rule
from pods_rl.tasks import load_task

from .cli import pods

MODULE = """
import torch
from datasets import Dataset
from pods_rl.tasks import Task

def last(rewards, m, *, generator=None):
    return torch.arange(rewards.shape[1] - m, rewards.shape[1]).expand(len(rewards), m)

def doubles(settings):
    answers = settings.get("task_options") or {"1+1=": "2"}
    rows = Dataset.from_dict({"prompt": list(answers), "answer": list(answers.values())})
    return Task("doubles", "1", rows, rows, {"accuracy": 1.0})
"""


def write_distribution(folder: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write what pip installs of a package next to its modules: its metadata and its entry points."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{entry} = {place}" for entry, place in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of one module into a folder of the import path, as pip would."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def install(package: str, text: str = MODULE, **entries: dict[str, str]) -> None:
        (tmp_path / f"{package}.py").write_text(text)
        groups = {}
        for group, names in entries.items():
            groups[f"pods_rl.{group}"] = {name: f"{package}:{value}" for name, value in names.items()}
        write_distribution(tmp_path, package, "1.5", groups)
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - modules:
        if name.startswith("users_"):
            del sys.modules[name]


def recipe(**values):
    return build_recipe(
        {"model_name_or_path": "tiny", "num_generations": 2, "max_steps": 1, **values}, Origin("r.yaml")
    )


def test_a_rule_is_found_by_its_name(install):
    install("users_rules", rules={"latest": "last"})
    check_rule("latest")
    assert select(torch.zeros(2, 5), 2, rule="latest").indices.tolist() == [[3, 4]] * 2


def test_a_task_is_found_by_its_name_and_checked_as_a_users_own(install):
    install("users_tasks", tasks={"twice": "doubles"})
    settings = recipe(task="twice").task_settings()
    assert load_task(settings).train[:] == {"prompt": ["1+1="], "answer": ["2"]}
    with pytest.raises(UserError, match=r"(twice|doubles)"):
        load_task({"task": "twice", "task_options": {"1+1=": " "}})
    assert "users_tasks 1.5" in pods("tasks").output


def test_no_package_replaces_a_shipped_name(install):
    install("users_rules", rules={"max_variance": "last"}, tasks={"arithmetic": "doubles"})
    assert get_rule("max_variance") is RULES["max_variance"]
    assert load_task({"task": "arithmetic", "task_train_size": 2, "task_test_size": 2}).name == "arithmetic"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("import no_such_module", "ModuleNotFoundError"), ("", "AttributeError"), ("last = doubles = 3", "int")],
)
def test_a_package_that_fails_is_named(install, text, reason):
    install("users_broken", text, rules={"latest": "last"}, tasks={"twice": "doubles"})
    for find in (lambda: get_rule("latest"), lambda: load_task({"task": "twice"})):
        with pytest.raises(UserError, match=rf"users_broken 1\.5 .*{reason}"):
            find()


def test_a_name_of_two_packages_is_refused_with_both(install):
    for package in ("users_first", "users_second"):
        install(package, rules={"latest": "last"})
    with pytest.raises(UserError, match=r"users_\w+ 1\.5 \(users_\w+:last\).*users_\w+ 1\.5 \(users_\w+:last\)"):
        get_rule("latest")
    assert get_rule("users_first:last") is not get_rule("users_second:last")


def test_an_unknown_name_suggests_those_of_packages(install):
    install("users_rules", rules={"latest": "last"}, tasks={"twice": "doubles"})
    with pytest.raises(UserError, match=r"latest\?"):
        get_rule("lattest")
    with pytest.raises(UserError, match=r"task: .*twice\?"):
        recipe(task="twicee")


def test_a_changed_module_of_a_package_is_a_change_of_the_run(install, tmp_path):
    install("users_rules", rules={"latest": "last"}, tasks={"twice": "doubles"})
    named = recipe(task="twice", rule="latest", num_rollouts=16)
    importlib.import_module("users_rules")
    before = contents_of(named) | module_hashes(user_sources())
    (tmp_path / "users_rules.py").write_text(MODULE + "\n")
    assert changed_contents(before, contents_of(named) | module_hashes(user_sources())) == ["modules (users_rules.py)"]
    entries = tmp_path / "users_rules-1.5.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace("last", "first"))
    assert changed_contents(before, contents_of(named)) == ["rule (entry point)"]
