"""`pods plan` through the real command, on a random policy that trains in a second, and on dumps of rollouts."""

from __future__ import annotations

import json
import random
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


def dump(path: Path, rates: list[float], rollouts: int = 32) -> Path:
    draw = random.Random(0)
    rows = [
        {"prompt": f"p{i}", "score": float(draw.random() < r)} for i, r in enumerate(rates) for _ in range(rollouts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rollouts_of_another_framework_give_signals_without_a_recommendation(tmp_path):
    words = ["plan", "--reward-key", "score", "--prompts", "4", "-m", "8", "--rollouts"]
    found = pods(*words, dump(tmp_path / "hard.jsonl", [0.02, 0.05, 0.1] * 8)).output
    assert "768 rollouts" in found
    assert "64 -> 8" in found
    assert "Recommended" not in found
    found = pods(*words, dump(tmp_path / "right.jsonl", [1.0] * 8)).output
    assert "do not show the signal: keep GRPO" in " ".join(found.split())
    assert "[" not in found  # no interval


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


def test_a_plan_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(UserError, match="Missing recipe"):
        pods("plan")
    with pytest.raises(UserError, match="times nothing"):
        pods("plan", "--rollouts", dump(tmp_path / "d", [0.5]), "--write", "plan.yaml")
    (tmp_path / "n").write_text('{"prompt": 1, "reward": null}\n')
    with pytest.raises(UserError, match="no rollout has a reward"):
        pods("plan", "--rollouts", tmp_path / "n")
