"""The shipped policies: small, loadable by name of their classes alone, able to reason and seldom right."""

import json

import pytest
import torch
from tools.pretrain import TAGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_rl.policies import SHIPPED, policy_path, tiny_policy_path
from pods_rl.recipe import Origin, build_recipe
from pods_rl.tasks import load_task

LONGEST_CHAIN = len("37" + 5 * "\n+10=99" + "90") + len(TAGS) + 1


@pytest.fixture(scope="module", params=SHIPPED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return AutoTokenizer.from_pretrained(tiny_policy_path(name))


@pytest.fixture(scope="module")
def model(name):
    return AutoModelForCausalLM.from_pretrained(tiny_policy_path(name), dtype=torch.float32).eval()


def sample(model, tokenizer, prompts, **how):
    """Complete the prompts, the longer ones apart from the shorter, in the order given."""
    texts = {}
    for start in range(0, len(prompts), 128):
        part = sorted(prompts, key=len)[start : start + 128]
        encoded = tokenizer(part, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad():
            ids = model.generate(**encoded, max_new_tokens=LONGEST_CHAIN, **how)[:, encoded["input_ids"].shape[1] :]
        texts.update(zip(part, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True))
    return [texts[prompt] for prompt in prompts]


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


@pytest.mark.slow
def test_is_seldom_right_when_sampled(name, model, tokenizer):
    task = load_task({"task": SHIPPED[name], "task_train_size": 1, "task_test_size": 256})
    torch.manual_seed(0)
    texts = sample(model, tokenizer, list(task.test["prompt"]))
    right = [grade.answer for grade in task.grade(texts, task.test["answer"])]
    least, most = {"tiny": (0.15, 0.35), "tiny-words": (0.1, 0.35)}[name]
    assert least <= sum(right) / len(right) <= most
