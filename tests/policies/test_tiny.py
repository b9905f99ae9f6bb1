"""The shipped policies: small, without code, and each for its task."""

import json

import pytest

from pods_rl.policies import SHIPPED, policy_path, tiny_policy_path
from pods_rl.recipe import Origin, build_recipe


def test_are_small_and_hold_nothing_but_safetensors_and_text():
    files = [path for name in SHIPPED for path in tiny_policy_path(name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    for name in SHIPPED:
        assert "model_type" in json.loads((tiny_policy_path(name) / "config.json").read_text())
        assert policy_path(name) == str(tiny_policy_path(name))


@pytest.mark.parametrize("policy", SHIPPED)
def test_is_the_policy_of_its_task_unless_another_is_named(policy):
    recipe = build_recipe({"max_steps": 1, "task": SHIPPED[policy]}, Origin("a test"))
    assert recipe.values["model_name_or_path"] == policy
