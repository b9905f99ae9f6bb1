"""Reward functions that raise, hang or give something else than a list of floats."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from pods_rl.engines.trl import killable
from pods_rl.engines.trl.reward_calls import check_scores
from pods_rl.engines.trl.scoring import trl_reward
from pods_rl.errors import UserError
from pods_rl.rewards import get_reward
from pods_rl.rewards.own import own_pool

from ..engines.conftest import letter_reward
from . import own_rewards

SECONDS = 5.0
# Not a time to keep: past it a hang is one.
DEADLINE = 120.0


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


def test_what_raises_is_named_with_its_row_and_prompt(make_trainer, numbered):
    trainer = make_trainer(reward=raise_for({1}), num_rollouts=8, train_dataset=numbered, shuffle_dataset=False)
    with pytest.raises(UserError) as told:
        trainer.train()
    message = str(told.value)
    assert message.startswith(
        "reward function 'picky' raised ZeroDivisionError: \\x1b[2Jno letters (test_reward_functions.py, line "
    )
    assert "for row 8 of 16, prompt 'evil\\x1b[2J=', completion '" in message
    assert "set reward_errors: zero" in message
    assert "\x1b" not in message
    assert isinstance(told.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_recipe_may_go_on_without_those_rows(make_trainer, numbered, caplog, policy):
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(
            reward=raise_for({1}), num_rollouts=8, train_dataset=numbered, shuffle_dataset=False, reward_errors=policy
        )
        trainer.train()
    lines = trainer.state.log_history[:2]
    assert [line["pods/reward_errors"] for line in lines] == [8.0, 8.0]
    assert [line["pods/unscored_rollouts"] for line in lines] == ([0.0, 0.0] if policy == "zero" else [8.0, 8.0])
    good, bad = trainer.rollouts.rewards
    assert torch.isfinite(good).all()
    assert (bad == 0).all() if policy == "zero" else bad.isnan().all()
    assert (trainer.rollouts.advantages[1] == 0).all()
    warnings = [record.message for record in caplog.records if "picky" in record.message]
    assert sum("for row 8 of 16, prompt 'evil" in message for message in warnings) == 1
    assert len(warnings) == (1 if policy == "zero" else 2)


def test_one_that_raises_for_the_batch_alone_is_told(make_trainer):
    def at_most_one(completions, **_):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(UserError, match=r"raised RuntimeError: too many .* for none of them alone"):
        make_trainer(reward=at_most_one, num_rollouts=8).train()


def test_an_async_function_that_raises_is_named(make_trainer):
    async def judge(completions, **_):
        raise TimeoutError("no answer")

    with pytest.raises(UserError, match="reward function 'judge' raised TimeoutError: no answer"):
        make_trainer(reward=judge, num_rollouts=8).train()


# -- ... that give something else ------------------------------------------------------------------------------------


@dataclass
class Odd:
    value: int = 1


MALFORMED = {
    "too few": (lambda n: [1.0] * (n - 1), "gave a list of 15"),
    "text": (lambda n: ["1.0"] * n, r"gave '1\.0' \(str\) for row 0"),
    "two axes": (lambda n: torch.ones(n, 1), r"gave a Tensor of shape \[16, 1\]"),
    "None": (lambda n: None, "gave None"),
    "a dict": (lambda n: dict.fromkeys(range(n), 1.0), "gave a dict"),
    "a generator": (lambda n: (1.0 for _ in range(n)), "gave a generator"),
    "nested": (lambda n: [[1.0]] * n, r"gave \[1\.0\] \(list\) for row 0"),
    "complex": (lambda n: [0.5] * (n - 1) + [1j], r"gave 1j \(complex\) for row 15"),
    "one number": (lambda n: 1.0, "gave a float"),
    "one text": (lambda n: "1" * n, "gave a str"),
    "objects": (lambda n: np.array([Odd()] * n, dtype=object), r"gave Odd\(value=1\) \(Odd\) for row 0"),
    "a number without an axis": (lambda n: np.float64(1.0), r"gave a float64 of shape \[\]"),
}
EIGHT = ("too few", "text", "two axes", "None", "a dict", "a generator", "nested", "complex")


def test_what_is_no_list_of_floats_is_refused_before_anything_is_trained(make_trainer, random_model):
    now = {}

    def mine(completions, **_):
        return now["value"](len(completions))

    trainer = make_trainer(reward=mine, num_rollouts=8, max_completion_length=2)
    for now["value"], came in (MALFORMED[kind] for kind in EIGHT):
        with pytest.raises(UserError, match=rf"^reward function 'mine' {came}; expected a list of 16 floats, one per"):
            trainer.train()
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), random_model.parameters(), strict=True))
    print(f"\nmalformed: {len(EIGHT)} of {len(EIGHT)} name the function and a list of 16 floats; nothing trained")


@pytest.mark.parametrize("kind", sorted(MALFORMED.keys() - set(EIGHT)))
def test_other_forms_are_refused_alike(kind):
    value, came = MALFORMED[kind]
    with pytest.raises(UserError, match=rf"^reward function 'mine' {came}; expected a list of 16 floats, one per"):
        check_scores(value(16), "mine", 16)


def test_what_counts_as_a_list_of_floats():
    given = (1, None, True, np.float32(0.5), torch.tensor(0.25), 10**400)
    assert check_scores(given, "mine", 6) == [1.0, None, 1.0, 0.5, 0.25, math.inf]
    for array in (np.array([1, 2]), torch.tensor([1.0, 2.0], requires_grad=True)):
        assert check_scores(array, "mine", 2) == [1.0, 2.0]


# -- ... that hang ---------------------------------------------------------------------------------------------------


MARK = f"left-behind-by-{os.getpid()}"


def running(mark: str) -> list[int]:
    """Processes whose command line holds this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="watches processes through /proc")


def call(function, rows=64):
    texts = [str(i) for i in range(rows)]
    return function(
        prompts=texts, completions=texts, completion_ids=[[0]] * rows, answer=[MARK] * rows,
        log_extra=lambda *_: None, log_metric=lambda *_: None,
    )  # fmt: skip


def in_a_recipe(name: str, seconds: float):
    return trl_reward(get_reward(f"tests.reliability.own_rewards:{name}"), limit=64, seconds=seconds)


def hung(function) -> float:
    """Seconds in which 64 rows are scored of which one hangs; everything else must be right, and nothing left."""
    began = time.monotonic()
    scores = call(function)
    spent = time.monotonic() - began
    good = [i % 5 / 4 for i in range(64)]
    assert scores[17].late
    assert [x for i, x in enumerate(scores) if i != 17] == [x for i, x in enumerate(good) if i != 17]
    while running(MARK):  # what was killed takes a moment to go
        assert time.monotonic() - began < DEADLINE, running(MARK)
        time.sleep(0.05)
    assert spent < DEADLINE
    return spent


@needs_proc
@pytest.mark.parametrize("name", ["hangs", "spins"])
def test_one_that_hangs_in_a_recipe_costs_its_row(name):
    function = in_a_recipe(name, 1.0)
    hung(function)
    own_pool(f"tests.reliability.own_rewards:{name}", 1.0).close()


def row_wise(name):
    score = getattr(own_rewards, name)

    def rows(completions, answer, log_metric, **_):
        log_metric("rows", len(completions))
        return [score(text, gold) for text, gold in zip(completions, answer, strict=True)]

    return rows


@needs_proc
def test_one_that_hangs_in_a_child_costs_its_row():
    before = set(multiprocessing.active_children())
    hung(killable(row_wise("hangs"), seconds=2.0))
    assert set(multiprocessing.active_children()) == before


@needs_proc
@pytest.mark.reliability
def test_a_hang_of_five_seconds_holds_a_step_up_for_ten_at_most():
    pool = own_pool("tests.reliability.own_rewards:hangs", SECONDS)
    pool.score(["1"] * 8, [""] * 8)  # the processes are there
    recipe = hung(in_a_recipe("hangs", SECONDS))
    pool.close()
    child = hung(killable(row_wise("hangs"), SECONDS))
    print(f"\nhangs: one row of 64, limit 5 s: {recipe:.1f} s in a recipe, {child:.1f} s in a child, 0 processes left")
    assert max(recipe, child) < 2 * SECONDS


def test_a_reward_of_a_recipe_that_raises_or_gives_text_fails_by_row():
    for name, why in (("raises", "raised KeyError: '\\x1b[2Jno 17' ("), ("gives_text", "raised TypeError: reward")):
        for seconds in (60.0, None):
            scores = call(in_a_recipe(name, seconds))
            assert [i for i, x in enumerate(scores) if not isinstance(x, float)] == [17]
            assert scores[17].reason.startswith(why)
        own_pool(f"tests.reliability.own_rewards:{name}", 60.0).close()


def test_what_a_child_gives_logs_or_raises_reaches_the_trainer(make_trainer, numbered):
    def logs(completions, log_metric, log_extra, **_):
        log_metric("letters", float(len(completions)))
        log_extra("length", [len(text) for text in completions])
        return torch.tensor(letter_reward(completions))

    trainer = make_trainer(reward=killable(logs, seconds=60), num_rollouts=8, max_steps=1)
    trainer.train()
    plain = make_trainer(reward=logs, num_rollouts=8, max_steps=1)
    plain.train()
    assert torch.equal(trainer.rollouts.rewards, plain.rollouts.rewards)
    assert trainer.state.log_history[0]["letters"] == 16.0
    assert list(trainer._logs["extra"]["length"]) == list(plain._logs["extra"]["length"])
    with pytest.raises(UserError, match=r"reward function 'picky' raised ZeroDivisionError.*for row 8 of 16"):
        make_trainer(
            reward=killable(raise_for({1}), 60), num_rollouts=8, train_dataset=numbered, shuffle_dataset=False
        ).train()
    with pytest.raises(UserError, match=r"'ends' ended its process for row 0"):
        make_trainer(reward=killable(ends, 60), num_rollouts=4).train()
    with pytest.raises(UserError, match=r"'<lambda>' gave None; expected a list of 8 floats"):
        make_trainer(reward=killable(lambda completions, **_: None, 60), num_rollouts=4).train()


def ends(completions, **_):
    os._exit(3)


def test_a_hang_in_training_is_dropped_and_counted(make_trainer):
    def hangs(completions, number, **_):
        while 1 in number:
            time.sleep(60)
        return letter_reward(completions)

    rows = Dataset.from_dict({"prompt": ["1+2=", "2+2="] * 8, "number": [0, 1] * 8})
    trainer = make_trainer(
        reward=killable(hangs, 0.5), num_rollouts=4, train_dataset=rows, shuffle_dataset=False, max_steps=1,
        reward_errors="drop",
    )  # fmt: skip
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["pods/reward_timeouts"] == 4.0
    assert line["pods/reward_errors"] == 0.0
    assert trainer.rollouts.rewards.isnan().any(dim=1).tolist() == [False, True]
