"""`pods plan` through the real command, on a random policy that trains in a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import pods_rl.planning.plan
import pods_rl.training.planning
from pods_rl.errors import UserError
from pods_rl.recipe import load_recipe

from . import pods
from .test_whole_run import place  # noqa: F401  (a fixture)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_is_measured_printed_and_written(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pods_rl.training.planning, "_MOST", 2)
    monkeypatch.setattr(pods_rl.planning.plan, "_STEPS", 20)
    done = pods("plan", "r.yaml", "--seconds", "1", "--write", "planned.yaml")
    assert max(map(len, done.output.splitlines())) <= 80
    for part in ("rewards", "prices", "Limits:", "Recommended: ", "pods train --config planned.yaml"):
        assert part in done.output
    written = load_recipe("planned.yaml").values
    assert written["num_rollouts"] >= written["num_generations"]
    assert written["task"] == load_recipe("r.yaml").values["task"]


def test_a_recipe_is_never_written_over_and_other_files_only_with_force(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(yaml.safe_dump(dict(load_recipe("tiny-pods").given)))
    Path("link.yaml").symlink_to("r.yaml")
    Path("notes.txt").write_text("mine")
    monkeypatch.setattr(pods_rl.training.planning, "plan_recipe", lambda *_, **__: pytest.fail("measured first"))
    for target, message in {
        "r.yaml": "is the input", "link.yaml": "is the input", "notes.txt": "--force", ".": "is a directory",
        "no/where.yaml": "does not exist",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=message):
            pods("plan", "r.yaml", "--write", target)
    assert Path("notes.txt").read_text() == "mine"


def test_a_plan_without_a_recipe_is_refused():
    with pytest.raises(UserError, match="Missing recipe"):
        pods("plan")
