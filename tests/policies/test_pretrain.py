"""The script that trains the shipped policy: what it shows the policy, and that it writes one that loads."""

import doctest
import random

import pytest
from tools import pretrain
from tools.pretrain import IGNORED, LESSONS, RIGHT, build_tokenizer, completion_batches, sum_of


def test_its_examples_run():
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
