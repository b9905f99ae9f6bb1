"""Rewards that cannot be trained on reach no advantage, no loss and no selection while others remain."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ..engines.conftest import letter_reward

NONE = ("nan", "None")  # as in TRL, NaN is None
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e38": 1e38, "None": None}
M, N = 4, 12
WHICH = {"one row": lambda i, n: i == 1, "a whole group": lambda i, n: i < n, "all": lambda i, n: True}


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
        none = case.bad in NONE
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
    said = "no reward function scored" if case.bad in NONE else "reward function 'spoilt'"
    checks = (
        torch.equal(r.rewards.isnan(), bad),
        torch.equal((~bad).gather(1, r.kept).sum(dim=1), scored_left),
        bool(torch.isfinite(r.advantages).all()),
        torch.allclose(r.advantages.double(), expected_advantages(r.rewards, r.kept, case), atol=1e-5),
        math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]),
        all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters()),
        line["pods/unscored_rollouts"] == bad.sum(),
        line["pods/unusable_rewards"] == (0 if case.bad in NONE else bad.sum()),
        line["pods/bad_loss"] == line["pods/bad_gradient"] == 0,
        len(warnings) == 1 and said in warnings[0],
        "All reward functions returned None" not in caplog.text,
    )
    return all(checks)


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


def test_a_weight_that_makes_a_reward_infinite_is_seen(make_trainer):
    trainer = make_trainer(
        reward=lambda completions, **_: [1e10 if i == 1 else 0.0 for i in range(len(completions))],
        reward_weights=[1e30], num_rollouts=N, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.rollouts.rewards.isnan().sum() == 1
    assert torch.isfinite(trainer.rollouts.advantages).all()
