"""Reward functions that hang, and what they do to the processes that they are called in."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from pods_rl.engines.trl import killable
from pods_rl.errors import UserError
from pods_rl.rewards import accuracy_batch

from .. import DEADLINE, until, with_time
from ..engines.conftest import letter_reward, texts_of
from . import own_rewards
from .own_rewards import columns_of, gone, running
from .test_reward_functions import numbered, raise_for

__all__ = ["numbered"]

MARK = f"left-behind-by-{os.getpid()}"
needs_proc = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="watches processes through /proc")


def row_wise(name):
    score = getattr(own_rewards, name)

    def rows(completions, answer, log_metric, **_):
        log_metric("rows", len(completions))
        return [score(text, gold) for text, gold in zip(completions, answer, strict=True)]

    return rows


@needs_proc
def test_one_that_hangs_in_a_child_costs_its_row():
    """The scores of 63 other rows are right, and nothing of the hung one is left."""
    before = set(multiprocessing.active_children())
    good = [i % 5 / 4 for i in range(64)]

    def check(seconds: float) -> None:
        scores = killable(row_wise("hangs"), seconds)(**columns_of([str(i) for i in range(64)], MARK))
        assert scores[17].late
        assert [x for i, x in enumerate(scores) if i != 17] == [x for i, x in enumerate(good) if i != 17]
        assert gone(MARK)  # what was killed takes a moment to go

    with_time(check, 2.0)
    assert set(multiprocessing.active_children()) == before


def test_a_function_in_a_child_may_ask_a_verifier():
    def judge(completions, answer, **_):
        return accuracy_batch(completions, answer)

    texts = [r"\boxed{\sqrt{8}}", r"\boxed{\sqrt{7}}"]
    accuracy_batch(texts[:1], [r"2\sqrt{2}"])  # this process has verifiers too
    assert killable(judge, DEADLINE)(**columns_of(texts, r"2\sqrt{2}")) == [1.0, 0.0]


@needs_proc
def test_what_a_function_leaves_running_ends_with_a_killed_trainer():
    mark = f"{MARK}-killed"
    process = multiprocessing.get_context("fork").Process(
        target=lambda: killable(row_wise("leaves_behind_and_spins"), DEADLINE)(**columns_of(["1"], mark))
    )
    process.start()
    until(lambda: len(running(mark)) == 3 or not process.is_alive())
    assert process.is_alive()
    process.kill()
    process.join()
    assert gone(mark)


def test_what_a_child_gives_logs_or_raises_reaches_the_trainer(make_trainer, numbered):
    def logs(completions, log_metric, log_extra, **_):
        log_metric("letters", float(len(completions)))
        log_extra("length", [len(text) for text in completions])
        return torch.tensor(letter_reward(completions))

    trainer = make_trainer(reward=killable(logs, seconds=DEADLINE), num_rollouts=8, max_steps=1)
    trainer.train()
    plain = make_trainer(reward=logs, num_rollouts=8, max_steps=1)
    plain.train()
    assert torch.equal(trainer.rollouts.rewards, plain.rollouts.rewards)
    assert trainer.state.log_history[0]["letters"] == 16.0
    assert list(texts_of(trainer)["extra"]["length"]) == list(texts_of(plain)["extra"]["length"])
    with pytest.raises(UserError, match=r"'picky' .*ZeroDivisionError.*row 8 "):
        make_trainer(
            reward=killable(raise_for({1}), DEADLINE), num_rollouts=8, train_dataset=numbered, shuffle_dataset=False
        ).train()
    with pytest.raises(UserError, match=r"'ends' .*row 0"):
        make_trainer(reward=killable(ends, DEADLINE), num_rollouts=4).train()
    with pytest.raises(UserError, match=r"'<lambda>' .*None; .*\b8 "):
        make_trainer(reward=killable(lambda completions, **_: None, DEADLINE), num_rollouts=4).train()


def ends(completions, **_):
    os._exit(3)


def test_a_hang_in_training_is_dropped_and_counted(make_trainer):
    def hangs(completions, number, **_):
        while 1 in number:
            time.sleep(3600)
        return letter_reward(completions)

    rows = Dataset.from_dict({"prompt": ["1+2=", "2+2="] * 8, "number": [0, 1] * 8})

    def check(seconds: float) -> None:
        trainer = make_trainer(
            reward=killable(hangs, seconds), num_rollouts=4, train_dataset=rows, shuffle_dataset=False, max_steps=1,
            reward_errors="drop",
        )  # fmt: skip
        trainer.train()
        line = trainer.state.log_history[0]
        assert line["pods/reward_timeouts"] == 4.0
        assert "pods/reward_errors" not in line
        assert trainer.rollouts.rewards.isnan().any(dim=1).tolist() == [False, True]

    with_time(check, 0.5)
