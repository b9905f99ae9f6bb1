"""The script that trains the shipped policy: what it shows the policy, and that it writes one that loads."""

import random
from itertools import islice

import pytest
import torch
from benchmarks.pretrain import build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_rl.tasks.arithmetic import Problem, write_completion

from ..benchmarks import module

pretrain = module("pretrain")
IGNORED, LESSONS, RIGHT, Mixture = pretrain.IGNORED, pretrain.LESSONS, pretrain.RIGHT, pretrain.Mixture
completion_batches, drill_batches, main = pretrain.completion_batches, pretrain.drill_batches, pretrain.main


def labelled(tokenizer, labels):
    return tokenizer.decode([int(index) for index in labels if index != IGNORED])


def test_right_chains_are_right_and_the_loss_counts_the_completion_only():
    tokenizer = build_tokenizer()
    batch = next(completion_batches(tokenizer, RIGHT, 16, seed=0))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        prompt = tokenizer.decode(ids).split("<think>")[0]
        terms = tuple(int(term) for term in prompt.removesuffix("=").replace("-", "+-").split("+"))
        assert labelled(tokenizer, labels) == write_completion(Problem(terms)) + tokenizer.eos_token


def test_no_held_out_prompt_is_shown():
    tokenizer = build_tokenizer()
    for batch in islice(completion_batches(tokenizer, Mixture(), 64, seed=0), 4):
        for ids in batch["input_ids"]:
            prompt = tokenizer.decode(ids).split("=")[0]
            terms = tuple(int(term) for term in prompt.replace("-", "+-").split("+"))
            assert not Problem(terms).held_out


def test_what_follows_a_mistake_works_on_from_it():
    mixture, problem, rng = Mixture(hard_facts={"+7": 0.0}, sure=1.0), Problem((20, 17, 30)), random.Random(0)
    for _ in range(200):
        first, second = mixture.draw_totals(rng, problem)
        assert first != 37
        assert second == first + 30


@pytest.mark.parametrize("policy", LESSONS)
def test_script_writes_a_policy_that_loads_and_is_the_same_each_time(policy, tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        for name in ("first", "again"):
            options = "--skill-steps 2 --mistake-steps 1 --batch-size 2 --threads 1 --policy"
            main([*options.split(), policy, "--output", str(tmp_path / name)])
    finally:
        torch.set_num_threads(threads)
    assert "skill    2/2" in capsys.readouterr().out
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert weights[0] == weights[1]
    assert (tmp_path / "first" / "tokenizer.json").read_bytes() == (tmp_path / "again" / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert model.config.vocab_size == len(tokenizer)
