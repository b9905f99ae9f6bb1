"""The recipes for slime and ROLL, by the shapes and calls of their interfaces.

Neither is on the package index. The stand-ins below replace slime's `Sample` and rollout manager, as they are in its
commit 624b824 (21 August 2026), and ROLL's `UserDefinedRolloutLoop` and `RolloutContext`, as in its commit 8eb27cc
(18 August 2026).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from pods_rl import advantages, select
from pods_rl.engines.ledger import HELD_STEPS, StepLedger

P = 100
N = 16


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name, as an engine does by a path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def rewards_of_groups():
    """Groups of few values, so that ties are common; the first has equal rewards."""
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 5, (P, N), generator=draw).double() / 4
    rewards[0] = 0.5
    return rewards


# -- slime -------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """slime's: a number, or a dictionary of numbers of which `--reward-key` names one."""

    index: int
    group_index: int
    reward: float | dict[str, float]

    def get_reward_value(self, args):
        return self.reward[args.reward_key] if args.reward_key else self.reward


@pytest.mark.parametrize("reward_key", [None, "score"])
def test_slime_trains_the_kept_rows_with_their_advantages(example, reward_key):
    """As its rollout manager calls them: a list of groups, changed in place, and then the flat list of its samples."""
    recipe = example("slime_pods")
    args = SimpleNamespace(reward_key=reward_key)
    rewards = rewards_of_groups()
    groups = []
    for group_index, row in enumerate(rewards.tolist()):
        values = [{"score": value} for value in row] if reward_key else row
        groups.append([Sample(group_index * N + i, group_index, value) for i, value in enumerate(values)])
    assert recipe.keep(args, groups) is None
    kept = select(rewards, recipe.M)
    samples = list(chain(*groups))
    assert [sample.index for sample in samples] == [
        p * N + i for p, indices in enumerate(kept.indices.tolist()) for i in indices
    ]
    raw, normalized = recipe.normalize(args, samples)
    assert raw == rewards.gather(1, kept.indices).flatten().tolist()
    assert normalized == advantages(rewards, kept).flatten().tolist()
    assert torch.tensor(normalized).view(P, -1).mean(1).abs().max() < 1e-6
    assert normalized[: recipe.M] == [0.0] * recipe.M


# -- ROLL --------------------------------------------------------------------------------------------------------------


@dataclass
class Context:
    """ROLL's context of a prompt: it may change its copy of the settings, and says whether this is a validation."""

    rewards: torch.Tensor
    is_val: bool = False
    dropped: bool = False
    meta_info: dict = field(default_factory=lambda: {"generation_config": {"num_return_sequences": 4}})


class UserDefinedRolloutLoop:
    """ROLL's own loop: as many responses as the context says, each with its reward, or None for a dropped prompt."""

    async def process_new_prompt(self, context):
        count = context.meta_info["generation_config"]["num_return_sequences"]
        if context.dropped:
            return None
        rewards = context.rewards[:count]
        return [SimpleNamespace(number=i, batch={"response_level_rewards": rewards[i : i + 1]}) for i in range(count)]


@pytest.fixture
def roll(monkeypatch, example):
    """The recipe for ROLL, with the stand-in for its module."""
    names = ("roll", "roll.distributed", "roll.distributed.scheduler")
    for name in (*names, "roll.distributed.scheduler.user_defined_rollout_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].UserDefinedRolloutLoop = UserDefinedRolloutLoop
    return example("roll_pods")


def test_roll_commits_the_kept_responses(roll):
    rewards = rewards_of_groups()
    kept = select(rewards, 4)
    loop = roll.PODSRolloutLoop()
    assert roll.NUM_ROLLOUTS == N
    for row, indices in zip(rewards.float(), kept.indices.tolist(), strict=True):
        responses = asyncio.run(loop.process_new_prompt(Context(row)))
        assert [response.number for response in responses] == indices


def test_roll_validates_and_drops_prompts_as_before(roll):
    loop = roll.PODSRolloutLoop()
    responses = asyncio.run(loop.process_new_prompt(Context(torch.rand(N), is_val=True)))
    assert [response.number for response in responses] == [0, 1, 2, 3]
    assert asyncio.run(loop.process_new_prompt(Context(torch.rand(N), dropped=True))) is None


# -- the ledger of engines other than TRL ------------------------------------------------------------------------------


def test_the_ledger_joins_the_parts_of_a_step_in_any_order_and_forgets_old_steps(tmp_path):
    ledger = StepLedger(tmp_path, every=1)
    row = {"rollout": 0, "reward": 1.0, "turn_rewards": None}
    for step in (1, 2, 1, 2):
        ledger.add(step, [[row], [row]])
    for step in (1, 2):
        assert pq.read_table(tmp_path / f"step-{step:06d}.parquet")["group"].to_pylist() == [0, 1, 2, 3]
    for step in range(3, 2 + HELD_STEPS + 1):
        ledger.add(step, [[row]])
    assert sorted(ledger._rows) == list(range(3, 2 + HELD_STEPS + 1))
