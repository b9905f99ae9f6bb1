"""The shipped policy: small, loadable by name of its classes alone, able to reason and seldom right."""

import json
import string

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_rl.policies import tiny_policy_path
from pods_rl.policies.build import TAGS
from pods_rl.tasks.arithmetic import Problem, arithmetic_task, write_completion

LONGEST_CHAIN = len("37" + 5 * "\n+10=99" + "90") + len(TAGS) + 1


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_policy_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_policy_path(), dtype=torch.float32).eval()


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


def test_is_small_and_holds_nothing_but_safetensors_and_text():
    files = [path for path in tiny_policy_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    assert "model_type" in json.loads((tiny_policy_path() / "config.json").read_text())


def test_has_about_a_million_parameters_in_float32(model):
    assert 500_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    stored = json.loads((tiny_policy_path() / "config.json").read_text())
    assert stored["dtype"] == "float32"
    assert model.config.architectures == ["Qwen2ForCausalLM"]


def test_tags_are_single_ordinary_tokens(tokenizer):
    for tag in TAGS:
        (index,) = tokenizer.encode(tag)
        assert tokenizer.decode([index], skip_special_tokens=True) == tag
        assert index not in tokenizer.all_special_ids


def test_end_and_padding_are_special_and_distinct(tokenizer):
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode([tokenizer.pad_token_id, tokenizer.eos_token_id], skip_special_tokens=True) == ""
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template is None


def test_every_prompt_and_chain_survives_the_round_trip(tokenizer):
    texts = [*arithmetic_task(train_size=200, test_size=50).train["prompt"], write_completion(Problem((37, 58, -14)))]
    texts += [string.printable[:95], "two  spaces , a comma", "x</think>y<think>", "3 × 4 = zwölf"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_samples_from_the_whole_distribution_by_default(model):
    settings = model.generation_config
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (True, 1.0, 0, 1.0)


def test_is_seldom_right_when_sampled(model, tokenizer):
    test = arithmetic_task(train_size=1, test_size=256).test
    task = arithmetic_task(train_size=1, test_size=1)
    torch.manual_seed(0)
    texts = sample(model, tokenizer, list(test["prompt"]))
    right = [grade.answer for grade in task.grade(texts, test["answer"])]
    assert 0.15 <= sum(right) / len(right) <= 0.35
