"""The script that trains the shipped policy: what it shows the policy, and that it writes one that loads."""

import doctest
import re
from itertools import islice

import pytest
import torch
from tools import pretrain
from tools.pretrain import IGNORED, LESSONS, RIGHT, Mixture, build_tokenizer, completion_batches, sum_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_rl.tasks.generated import is_held_out


def labelled(tokenizer, labels):
    return tokenizer.decode([int(index) for index in labels if index != IGNORED])


def test_its_examples_run():
    assert doctest.testmod(pretrain).failed == 0


def test_right_chains_are_right_and_the_loss_counts_the_completion_only():
    tokenizer = build_tokenizer()
    batch = next(completion_batches(tokenizer, RIGHT, 16, seed=0))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        prompt = tokenizer.decode(ids).split("<think>")[0]
        terms = [int(term) for term in re.findall(r"[+-]?\d+", prompt)]
        assert labelled(tokenizer, labels) == sum_of(terms).write_completion() + tokenizer.eos_token


def test_no_held_out_prompt_is_shown():
    tokenizer = build_tokenizer()
    for batch in islice(completion_batches(tokenizer, Mixture(), 64, seed=0), 4):
        for ids in batch["input_ids"]:
            assert not is_held_out(tokenizer.decode(ids).split("=")[0] + "=")


@pytest.mark.slow
@pytest.mark.parametrize("policy", LESSONS)
def test_script_writes_a_policy_that_loads_and_is_the_same_each_time(policy, tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        for name in ("first", "again"):
            options = "--skill-steps 2 --mistake-steps 1 --batch-size 2 --threads 1 --policy"
            pretrain.main([*options.split(), policy, "--output", str(tmp_path / name)])
    finally:
        torch.set_num_threads(threads)
    assert "skill    2/2" in capsys.readouterr().out
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert weights[0] == weights[1]
    assert (tmp_path / "first" / "tokenizer.json").read_bytes() == (tmp_path / "again" / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert model.config.vocab_size == len(tokenizer)
