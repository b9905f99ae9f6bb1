"""Batch arithmetic: worked values, and advice that is itself valid."""

import math
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_rl.engines.trl.batching import Shares, batch_plan
from pods_rl.errors import UserError


def test_every_rollout_has_one_process_which_is_given_rows_of_its_prompt():
    for prompts, m, n, processes in product(range(1, 6), range(1, 6), range(1, 13), range(1, 7)):
        if n < m or prompts * m % processes or prompts * n % processes:
            continue
        shares, everyone = Shares(prompts, n, processes), range(processes)
        assert [r for process in everyone for r in shares.rollouts(process)] == list(range(prompts * n))
        for process in everyone:
            assert {r // shares.rollouts_each for r in shares.rollouts(process)} == {process}
            rows = range(process * prompts * m // processes, (process + 1) * prompts * m // processes)
            assert {r // n for r in shares.rollouts(process)} == {r // m for r in rows}


def test_every_process_generates_as_many_rollouts_of_a_group_that_is_spread():
    settings = {"num_generations": 16, "per_device_train_batch_size": 4}
    with pytest.raises(UserError, match=r"num_rollouts 34 = 34\b.* 32 or 36\."):
        batch_plan(settings | {"num_rollouts": 34}, processes=4)
    for n in (32, 36):
        plan = batch_plan(settings | {"num_rollouts": n}, processes=4)
        assert (plan.prompts_per_generation, plan.micro_batch_rows, plan.shares.rollouts_each) == (1, 4, n // 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "num_generations = 1: "),
        ({"rollout_batch_size": 0}, "rollout_batch_size"),
        ({"num_rollouts": 4}, r"8 of 4 .*num_rollouts .*\b8"),
        (
            {"num_generations": 3, "per_device_train_batch_size": 4, "steps_per_generation": 2},
            "steps_per_generation 2.* 3 or 6",
        ),
        ({"generation_batch_size": 4}, "generation_batch_size to 8 or 16"),
        ({"num_generations": 16, "generation_batch_size": 24}, "generation_batch_size to 16 or 32"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_unit(settings, message):
    with pytest.raises(UserError, match=message):
        batch_plan(settings)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("skip_zero_advantage_steps", "no", "True, False or None"),
        ("dynamic_sampling", 5, "True or False"),
        ("dynamic_sampling_rounds", 0, "1 .*dynamic_sampling: false"),
        ("max_tokens_per_microbatch", "all", "whole .*auto"),
        ("rollout_batch_size", "4", "whole"),
        ("num_rollouts", True, "whole"),
        ("rule", None, "^rule .*None"),
        # of TRL: with these it trains nothing, without an error
        ("max_steps", 0, "max_steps = 0: .*-1"),
        ("num_train_epochs", 0, "max_steps"),
        ("reward_weights", [0.0, 0], "not 0"),
        ("reward_weights", [1.0, math.nan], "finite"),
    ],
)
def test_values_of_the_configuration_are_checked(key, value, message):
    from pods_rl import PODSConfig

    with pytest.raises(UserError, match=message) as caught:
        PODSConfig("unused", use_cpu=True, bf16=False, **{key: value})
    assert key in str(caught.value)


small = st.integers(1, 12)


@given(m=st.integers(2, 20), rows=small, accumulation=small, processes=small)
def test_the_two_values_it_names_work(m, rows, accumulation, processes):
    settings = {"num_generations": m, "gradient_accumulation_steps": accumulation}
    key = "per_device_train_batch_size"
    try:
        plan = batch_plan(settings | {key: rows}, processes)
    except UserError as error:
        for value in re.search(r"to (\d+) or (\d+)\.$", str(error)).groups():
            batch_plan(settings | {key: int(value)}, processes)
    else:
        assert plan.rows_per_generation == rows * accumulation * processes
        assert plan.prompts_per_generation * m == plan.rows_per_generation
