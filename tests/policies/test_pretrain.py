"""The script that trains the shipped policy: what it shows the policy, and that it writes one that loads."""

import random
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_rl.policies.build import build_tokenizer
from pods_rl.rewards import format_reward
from pods_rl.tasks.arithmetic import Problem, take_step, write_completion
from pods_rl.tasks.words import WordProblem

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


def test_drills_count_running_totals_only():
    tokenizer = build_tokenizer()
    batch = next(drill_batches(tokenizer, 3, seed=0))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        lines = tokenizer.decode(ids, skip_special_tokens=True).removeprefix("<think>").split("\n")
        assert labelled(tokenizer, labels) == "".join(line.split("=")[1] for line in lines[1:])


@pytest.mark.parametrize(
    ("terms", "expected"), [((20, 31, 11), 0.97**2), ((20, 13, 17), 0.4 * 0.02), ((90, -48), 0.05)]
)
def test_chance_of_a_right_chain_is_the_product_over_its_facts(terms, expected):
    facts = {"+3": 0.4, "+7": 0.02, "-8": 0.05}
    mixture, problem, rng = Mixture(hard_facts=facts), Problem(terms), random.Random(0)
    draws = 20_000
    right = sum(mixture.draw_totals(rng, problem) == problem.totals for _ in range(draws)) / draws
    assert right == pytest.approx(expected, abs=4 * (expected * (1 - expected) / draws) ** 0.5)


def test_what_follows_a_mistake_works_on_from_it():
    mixture, problem, rng = Mixture(hard_facts={"+7": 0.0}, sure=1.0), Problem((20, 17, 30)), random.Random(0)
    for _ in range(200):
        first, second = mixture.draw_totals(rng, problem)
        assert first != 37
        assert second == first + 30


def test_a_wrong_step_of_a_word_problem_is_never_right_in_its_last_digit():
    mixture, problem = LESSONS["tiny-words"].mistakes, WordProblem("", "", 20, (("+", 2), ("+", 5), ("-", 7)))
    rng, wrong = random.Random(0), 0
    for _ in range(500):
        totals = [problem.start, *mixture.draw_totals(rng, problem)]
        slips = [
            total - take_step(left, step) for left, step, total in zip(totals, problem.steps, totals[1:], strict=False)
        ]
        assert all(slip == 0 or slip % 10 for slip in slips)
        wrong += sum(map(bool, slips))
    assert wrong / 1500 == pytest.approx(0.98, abs=0.02)


def test_share_of_broken_form_is_kept():
    mixture, problem, rng = Mixture(broken_form=0.25), Problem((20, 30)), random.Random(0)
    broken = sum(format_reward(mixture.draw_completion(rng, problem)) < 1 for _ in range(4000)) / 4000
    assert broken == pytest.approx(0.25, abs=0.03)


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


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(
        f"--{name}" in said for name in ("output", "skill-steps", "mistake-steps", "batch-size", "seed", "threads")
    )
