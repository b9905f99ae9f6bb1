"""What the host of the repository reads: workflows, and the notes of a release."""

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


def test_the_notes_of_a_release_are_those_of_its_version():
    assert doctest.testmod(notes).failed == 0
    headings = re.findall(r"^## (\S+) \((\S+)\)$", notes.CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0][0] == pods_rl.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", headings[0][1])
