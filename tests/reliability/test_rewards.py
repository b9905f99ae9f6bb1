"""Rewards that cannot be trained on, and functions that raise, hang or give something else than a list of floats."""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from pods_rl.engines.trl import killable
from pods_rl.engines.trl.scoring import trl_reward
from pods_rl.errors import UserError
from pods_rl.rewards import get_reward
from pods_rl.rewards.own import own_pool

from ..engines.conftest import letter_reward
from . import own_rewards

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e38": 1e38, "None": None}
M, N = 4, 12
WHICH = {"one row": lambda i, n: i == 1, "a whole group": lambda i, n: i < n, "all": lambda i, n: True}
SECONDS = 5.0
# Not a time to keep: past it a hang is one.
DEADLINE = 120.0


# -- bad rewards ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    bad: str
    scale: str
    n: int
    when: str
    functions: int
    which: str


def spoilt_run(make_trainer, case: Case) -> Any:
    """One step in which the rewards of some rollouts are bad."""

    def spoilt(completions, **_):
        rewards = letter_reward(completions)
        return [BAD[case.bad] if WHICH[case.which](i, case.n) else reward for i, reward in enumerate(rewards)]

    def also(completions, **_):
        """A second function; where the first says None it has nothing to say either."""
        none = case.bad == "None"
        return [None if none and WHICH[case.which](i, case.n) else 0.25 for i in range(len(completions))]

    trainer = make_trainer(
        reward=[spoilt, also][: case.functions], num_rollouts=case.n, advantages=case.when, scale_rewards=case.scale,
        max_steps=1,
    )  # fmt: skip
    trainer.train()
    return trainer


def expected_advantages(rewards_PN, kept_PM, case: Case):
    """By hand, over scored rewards alone; 0 for a row without one."""
    kept = rewards_PN.gather(1, kept_PM).double()
    reference = kept if case.when == "after" else rewards_PN.double()
    whole = [x for x in reference.flatten().tolist() if not math.isnan(x)]
    advantages = torch.zeros_like(kept)
    for p, group in enumerate(reference.tolist()):
        scored = [x for x in group if not math.isnan(x)]
        over = {"group": scored, "batch": whole}.get(case.scale, [])
        scale = 1.0 if case.scale == "none" else np.std(over, ddof=1) + 1e-4 if len(over) > 1 else math.nan
        for i, x in enumerate(kept[p].tolist()):
            advantage = (x - np.mean(scored)) / scale if scored and not math.isnan(x) else 0.0
            advantages[p, i] = 0.0 if math.isnan(advantage) else advantage
    return advantages


def unharmed(make_trainer, caplog, case: Case) -> bool:
    """Whether a step kept clear of the bad rewards, and said so."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trainer = spoilt_run(make_trainer, case)
    r, line = trainer.rollouts, trainer.state.log_history[0]
    bad = torch.tensor([WHICH[case.which](i, case.n) for i in range(2 * case.n)]).view(2, case.n)
    scored_left = (~bad).sum(dim=1).clamp(max=M)
    warnings = [record.message for record in caplog.records if record.name.startswith("pods_rl")]
    said = "no reward function scored" if case.bad == "None" else "reward function 'spoilt'"
    checks = (
        torch.equal(r.rewards.isnan(), bad),
        torch.equal((~bad).gather(1, r.kept).sum(dim=1), scored_left),
        bool(torch.isfinite(r.advantages).all()),
        torch.allclose(r.advantages.double(), expected_advantages(r.rewards, r.kept, case), atol=1e-5),
        math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]),
        all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters()),
        line["pods/unscored_rollouts"] == bad.sum(),
        line["pods/unusable_rewards"] == (0 if case.bad == "None" else bad.sum()),
        line["pods/bad_loss"] == line["pods/bad_gradient"] == 0,
        len(warnings) == 1 and said in warnings[0],
        "All reward functions returned None" not in caplog.text,
    )
    return all(checks)


def every_case() -> Iterator[Case]:
    for bad, scale, which, functions in itertools.product(BAD, ("group", "batch", "none"), WHICH, (1, 2)):
        for n, when in ((M, "after"), (N, "after"), (N, "before")):
            yield Case(bad, scale, n, when, functions, which)


SAMPLE = (
    Case("nan", "batch", M, "after", 2, "one row"),
    Case("inf", "none", M, "after", 1, "a whole group"),
    Case("-inf", "batch", N, "before", 1, "a whole group"),
    Case("1e38", "none", N, "after", 2, "one row"),
    Case("None", "group", N, "after", 2, "all"),
    Case("nan", "group", N, "before", 1, "one row"),
)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.bad} {case.which} {case.scale}")
def test_bad_rewards_reach_nothing(make_trainer, caplog, case):
    assert unharmed(make_trainer, caplog, case)


@pytest.mark.reliability
@pytest.mark.timeout(1800)
def test_no_bad_reward_reaches_anything(make_trainer, caplog):
    cases = list(every_case())
    failed = [case for case in cases if not unharmed(make_trainer, caplog, case)]
    print(
        f"\nbad rewards: {len(cases) - len(failed)} of {len(cases)} unharmed: finite, not selected, counted, said once"
    )
    assert not failed


def test_a_weight_that_makes_a_reward_infinite_is_seen(make_trainer):
    trainer = make_trainer(
        reward=lambda completions, **_: [1e10 if i == 1 else 0.0 for i in range(len(completions))],
        reward_weights=[1e30], num_rollouts=N, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.rollouts.rewards.isnan().sum() == 1
    assert torch.isfinite(trainer.rollouts.advantages).all()


def test_a_hostile_text_that_nobody_scores_is_not_printed(make_trainer, caplog, capfd):
    """TRL prints such a prompt and completion as they are."""
    hostile = "\x1b[2J\x1b]0;gone\x07"
    rows = {"prompt": ["1+1="] * 8, "answer": [hostile] * 8}
    with caplog.at_level(logging.WARNING):
        make_trainer(
            reward=lambda completions, **_: [None] * len(completions), num_rollouts=8, max_steps=1,
            train_dataset=Dataset.from_dict(rows),
        ).train()  # fmt: skip
    out = capfd.readouterr()
    assert "\x1b" not in caplog.text + out.out + out.err
    assert "no reward function scored 16 of 16 rollouts" in caplog.text


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
        "reward function 'picky' raised ZeroDivisionError: \\x1b[2Jno letters (test_rewards.py, line "
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
    for now["value"], came in MALFORMED.values():
        with pytest.raises(UserError, match=rf"^reward function 'mine' {came}; expected a list of 16 floats, one per"):
            trainer.train()
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), random_model.parameters(), strict=True))
    print(f"\nmalformed: {len(EIGHT)} of {len(EIGHT)}, and {len(MALFORMED) - len(EIGHT)} more, name function and shape")


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
    assert running(MARK) == []
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
