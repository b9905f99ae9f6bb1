"""Reward functions that raise, or return something else than a list of floats."""

import functools
import logging
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from datasets import Dataset

from pods_rl.engines.trl import killable
from pods_rl.engines.trl.guarded.rewards import check_scores
from pods_rl.errors import UserError
from pods_rl.rewards import get_reward
from pods_rl.training.rewards import trl_reward

from .. import DEADLINE
from ..engines.conftest import letter_reward
from . import own_rewards

# -- reward functions that raise -----------------------------------------------------------------------------------


def raise_for(rows):
    """A function that raises where a column says so, whether it is called for all rows or for one."""

    def picky(completions, number, **_):
        for i in number:
            if i in rows:
                raise ZeroDivisionError("\x1b[2Jno letters")
        return letter_reward(completions)

    return picky


@pytest.fixture
def numbered():
    prompts = ["1+2=", "evil\x1b[2J="]
    return Dataset.from_dict({"prompt": prompts * 8, "answer": ["3"] * 16, "number": [0, 1] * 8})


class JudgeError(Exception):
    """What a function of a user's raises."""


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_a_function_raises_keeps_its_type_and_is_raised_once(make_trainer, kind):
    calls = []

    def judge(completions, **_):
        calls.append(len(completions))
        raise JudgeError("no \x1b[2Jletters")

    async def asked(**columns):
        return judge(**columns)

    with pytest.raises(JudgeError, match=r"no .*letters") as told:
        make_trainer(reward=judge if kind == "plain" else asked, num_rollouts=8).train()
    name = "judge" if kind == "plain" else "asked"
    (note,) = told.value.__notes__
    assert f"'{name}'" in note
    assert calls == [16]


def test_a_function_that_exits_ends_the_run_with_a_message(make_trainer):
    def leaves(completions, **_):
        raise SystemExit(0)

    with pytest.raises(UserError, match=r"'leaves' .*SystemExit: 0 \(test_reward_functions.py, "):
        make_trainer(reward=leaves, num_rollouts=8).train()


def test_a_row_that_raises_in_this_process_is_named_with_its_prompt_and_its_cause(make_trainer):
    reward = trl_reward(get_reward("tests.reliability.own_rewards:never"), limit=12)
    rows = Dataset.from_dict({"prompt": ["evil\x1b[2J="] * 16, "answer": ["3"] * 16})
    with pytest.raises(UserError) as told:
        make_trainer(reward=reward, num_rollouts=8, train_dataset=rows).train()
    message = str(told.value)
    assert re.search(r"'tests\.reliability\.own_rewards:never' .*KeyError: .*row 0 of 16, .*'evil\\x1b\[2J='", message)
    assert "reward_errors" in message
    assert "\x1b" not in message
    assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_recipe_may_go_on_without_those_rows(make_trainer, numbered, caplog, policy):
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(
            reward=raise_for({1}), num_rollouts=8, train_dataset=numbered, shuffle_dataset=False, reward_errors=policy
        )
        trainer.train()
    lines = trainer.state.log_history[:2]
    assert [line["pods/reward_errors"] for line in lines] == [8.0, 8.0]
    assert [line.get("pods/unscored_rollouts", 0.0) for line in lines] == (
        [0.0, 0.0] if policy == "zero" else [8.0, 8.0]
    )
    good, bad = trainer.rollouts.rewards
    assert torch.isfinite(good).all()
    assert (bad == 0).all() if policy == "zero" else bad.isnan().all()
    assert (trainer.rollouts.advantages.view(2, -1)[1] == 0).all()
    warnings = [record.message for record in caplog.records if "picky" in record.message]
    assert sum("row 8 of" in message for message in warnings) == 1
    assert len(warnings) == (1 if policy == "zero" else 2)


class Judge:
    """A callable object with a setting of its own."""

    shift = 0.0

    def __call__(self, completions, **_):
        return [x + self.shift for x in letter_reward(completions)]


def test_the_trainer_holds_the_user_s_own_functions(make_trainer):
    judge, half = Judge(), functools.partial(raise_for(()), number=[0])

    async def asked(completions, **_):
        return letter_reward(completions)

    async def never(**_):
        raise AssertionError("replaced")

    given = [letter_reward, judge, half, killable(own_rewards.rows_of_good, DEADLINE), never]
    trainer = make_trainer(reward=list(given), num_rollouts=8, max_steps=1)
    trainer.reward_funcs[4] = given[4] = asked  # as TRL lets them be replaced
    trainer.reward_funcs[1].shift = 0.5
    trainer.train()
    assert all(held is own for held, own in zip(trainer.reward_funcs, given, strict=True))
    assert trainer.reward_funcs[0].__name__ == "letter_reward"
    means = {name: trainer.state.log_history[0][f"rewards/{name}/mean"] for name in ("Judge", "picky", "letter_reward")}
    assert means["Judge"] == pytest.approx(means["letter_reward"] + 0.5)
    assert means["picky"] == pytest.approx(means["letter_reward"])


# -- ... that give something else ------------------------------------------------------------------------------------


MALFORMED = {
    "too few": (lambda n: [1.0] * (n - 1), "gave a list of 15"),
    "text": (lambda n: ["1.0"] * n, r"gave '1\.0' \(str\) for row 0"),
    "two axes": (lambda n: torch.ones(n, 1), r"gave a Tensor of shape \[16, 1\]"),
    "None": (lambda n: None, "gave None"),
    "a dict": (lambda n: dict.fromkeys(range(n), 1.0), "gave a dict"),
    "a generator": (lambda n: (1.0 for _ in range(n)), "gave a generator"),
    "nested": (lambda n: [[1.0]] * n, r"gave \[1\.0\] \(list\) for row 0"),
    "complex": (lambda n: [0.5] * (n - 1) + [1j], r"gave 1j \(complex\) for row 15"),
}


def test_what_is_no_list_of_floats_is_refused_before_anything_is_trained(make_trainer, random_model):
    now = {}

    def mine(completions, **_):
        return now["value"](len(completions))

    trainer = make_trainer(reward=mine, num_rollouts=8, max_completion_length=2)
    for now["value"], came in MALFORMED.values():
        with pytest.raises(UserError, match=rf"'mine' {came}; .*\b16 "):
            trainer.train()
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), random_model.parameters(), strict=True))


def test_what_counts_as_a_list_of_floats():
    given = (1, None, True, np.float32(0.5), torch.tensor(0.25))
    assert check_scores(given, "mine", 5) == [1.0, None, 1.0, 0.5, 0.25]
    given = (np.int64(2), np.bool_(True), np.float16(0.5), Fraction(1, 4), Decimal("0.5"), np.array(0.5))
    scores = check_scores(given, "mine", 6)
    assert scores == [2.0, 1.0, 0.5, 0.25, 0.5, 0.5]
    assert {type(score) for score in scores} == {float}
    for kind in (torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64):
        assert check_scores(torch.tensor([1, 0], dtype=kind), "mine", 2) == [1.0, 0.0]
        assert check_scores([torch.tensor(1, dtype=kind)], "mine", 1) == [1.0]
    for array in (np.array([1, 2]), torch.tensor([1.0, 2.0], requires_grad=True)):
        assert check_scores(array, "mine", 2) == [1.0, 2.0]
    assert check_scores([torch.tensor(0.5, requires_grad=True)], "mine", 1) == [0.5]
    assert all(map(math.isnan, check_scores([Decimal("sNaN"), 10**400], "mine", 2)))
    for odd in (np.complex64(1), torch.tensor(1j), np.str_("1"), b"1", torch.tensor(1.0, device="meta"), object()):
        with pytest.raises(UserError, match="row 0"):
            check_scores([odd], "mine", 1)
