"""What the host of the repository reads: owners of rooms, workflows, lists of versions, and the notes of a release."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import yaml
from tools import notes

import pods_rl

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_each_pattern_of_owners_is_a_place_that_exists():
    lines = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    patterns = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    assert [each for each in patterns[1:] if not (ROOT / each.strip("/")).is_dir()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_and_scripts_that_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert all(set(job.get("needs", "").split()) <= jobs.keys() for job in jobs.values())
    targets = {word for words in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", text) for word in words.split()}
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    assert [name for name in re.findall(r"python (\S+\.py)", text) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.in")), ids=lambda path: path.stem)
def test_a_list_has_the_versions_that_its_requirements_ask_for(path):
    """`make lock` wrote the lists; an override holds for all of them."""
    wanted = set(re.findall(r"^[\w.-]+==\S+$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert wanted
    lists = ROOT.glob("constraints*.txt") if path.stem == "overrides" else [ROOT / f"constraints-{path.stem}.txt"]
    for each in lists:
        assert wanted <= set(each.read_text(encoding="utf-8").splitlines())


def test_the_notes_of_a_release_are_those_of_its_version():
    assert doctest.testmod(notes).failed == 0
    headings = re.findall(r"^## (\S+) \((\S+)\)$", notes.CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0][0] == pods_rl.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", headings[0][1])
