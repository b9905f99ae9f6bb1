"""The shipped policies: small, without code, each for its task; their script shows them no test problem."""

import doctest
import json
import random

import pytest
from tools import pretrain
from tools.pretrain import IGNORED, LESSONS, RIGHT, build_tokenizer, completion_batches, sum_of

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


def test_the_examples_of_the_script_run():
    assert doctest.testmod(pretrain).failed == 0


def test_the_loss_counts_the_completion_and_its_end_only():
    tokenizer = build_tokenizer()
    batch = next(completion_batches(tokenizer, RIGHT, 2, seed=0, draw=lambda rng: sum_of([8, 5])))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        counted = labels != IGNORED
        assert tokenizer.decode(labels[counted]) == "<think>8\n+5=13</think><answer>13</answer>" + tokenizer.eos_token
        assert tokenizer.decode(ids).startswith("8+5=<think>")


@pytest.mark.parametrize("policy", LESSONS)
def test_no_lesson_draws_a_problem_of_the_test_side(policy):
    rng = random.Random(0)
    for draw in (LESSONS[policy].draw, *LESSONS[policy].easier):
        assert {draw(rng).held_out for _ in range(64)} == {False}
