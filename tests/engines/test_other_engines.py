"""The recipes for slime and ROLL, by the shapes and calls of their interfaces.

Neither is on the package index. The stand-ins below replace slime's `Sample` and rollout manager, as they are in its
commit 624b824 (21 August 2026), and ROLL's `UserDefinedRolloutLoop` and `RolloutContext`, as in its commit 8eb27cc
(18 August 2026).
"""

import asyncio
import sys
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from pods_rl import advantages, select_batch
from pods_rl.engines.ledger import HELD_STEPS, LedgerWriter
from pods_rl.engines.measuring import pad_rewards

from . import same_rows
from .same_rows import KEPT, KEPT_OF_BATCH, N

# -- slime -------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """slime's: a reward is a number, or a dictionary of numbers of which `--reward-key` names one."""

    index: int
    group_index: int
    reward: float | dict[str, float] | None
    response_length: int = 3
    loss_mask: list[int] | None = None  # slime makes one of ones
    remove_sample: bool = False  # slime makes the mask zeros

    def get_reward_value(self, args):
        return self.reward[args.reward_key] if args.reward_key else self.reward


def slime_args(**given):
    """What slime's arguments hold by default, with the names of its parser."""
    values = {
        "reward_key": None,
        "log_passrate": False,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,  # false with --disable-rewards-normalization
        "grpo_std_normalization": True,  # false with --disable-grpo-std-normalization
    }
    return SimpleNamespace(**(values | given))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.866, -0.866, 0.866, -0.866]),
        ({"grpo_std_normalization": False}, [1.5, -1.5, 1.5, -1.5]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [1.5, -1.5, 1.5, -1.5]),
        ({"rewards_normalization": False}, [3.0, 0.0, 3.0, 0.0]),
        ({"advantage_estimator": "ppo"}, [3.0, 0.0, 3.0, 0.0]),
    ],
    ids=str,
)
def test_slimes_options_mean_what_they_mean_without_pods(example, options, expected):
    samples = [Sample(i, 0, reward) for i, reward in enumerate([3.0, 0.0, 3.0, 0.0])]
    _, normalized = example("slime_pods").normalize(slime_args(**options), samples)
    assert normalized == pytest.approx(expected, rel=1e-3)


def slimes_groups(reward_key=None):
    """The rollouts of `same_rows` as slime holds them."""
    groups = []
    for rewards, tokens in zip(same_rows.REWARDS, same_rows.TOKENS, strict=True):
        group = []
        for i, reward in enumerate(rewards):
            value = reward if reward is None or reward_key is None else {"score": reward, "other": 1.0}
            sample = Sample(i, len(groups), value)
            if tokens[i] == 0 and i % 2:
                sample.remove_sample = True
            elif tokens[i] == 0:
                sample.loss_mask = [0, 0, 0]
            group.append(sample)
        groups.append(group)
    return groups


@pytest.mark.parametrize("reward_key", [None, "score"])
def test_slime_keeps_the_rows_of_every_engine_and_fills_a_group_with_what_trains_nothing(example, reward_key):
    recipe = example("slime_pods")
    args = slime_args(reward_key=reward_key)
    groups = slimes_groups(reward_key)
    complete = list(groups)  # slime holds these lists for its other functions
    recipe.keep(args, groups)
    raw, normalized = recipe.normalize(args, list(chain(*groups)))
    assert torch.tensor(raw).isfinite().all()
    trained = [[sample.index for sample in group if recipe.trained_tokens(sample)] for group in groups]
    assert trained == KEPT
    assert [len(group) for group in groups] == [recipe.M] * len(KEPT)
    for group, kept, values in zip(groups, KEPT, torch.tensor(normalized).view(-1, recipe.M), strict=True):
        fillers = torch.tensor([sample.index not in kept for sample in group])
        assert (values[fillers] == 0).all()
        assert values.sum().abs() < 1e-6
    assert all(len(group) == same_rows.N for group in complete)


def test_slime_over_the_batch_keeps_the_rows_of_every_engine(example, monkeypatch):
    recipe = example("slime_pods")
    monkeypatch.setattr(recipe, "SELECTION", "batch")
    groups = slimes_groups()
    recipe.keep(slime_args(), groups)
    assert [[sample.index for sample in group] for group in groups] == KEPT_OF_BATCH
    _, normalized = recipe.normalize(slime_args(), list(chain(*groups)))
    trained = [[tokens > 0 for tokens in group] for group in same_rows.TOKENS]
    rewards_PN = pad_rewards(same_rows.REWARDS, trained)
    expected = advantages(rewards_PN, select_batch(rewards_PN, 4 * len(KEPT)))
    torch.testing.assert_close(torch.tensor(normalized, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


def test_what_the_example_for_slime_cannot_do_is_refused(example):
    recipe = example("slime_pods")
    with pytest.raises(ValueError, match="log-passrate"):
        recipe.keep(slime_args(log_passrate=True), [[Sample(0, 0, 1.0)] * N])
    with pytest.raises(ValueError, match="samples"):
        recipe.keep(slime_args(), [[[Sample(0, 0, 1.0), Sample(1, 0, 1.0)]] * N])


# -- ROLL --------------------------------------------------------------------------------------------------------------


@dataclass
class Context:
    """ROLL's context of a prompt: it may change its copy of the settings, and says whether this is a validation."""

    rewards: torch.Tensor
    tokens: list[int] = field(default_factory=lambda: [3] * N)  # of each response, in the loss; 4 places
    pipeline_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_len_mask=False))
    is_val: bool = False
    dropped: bool = False
    meta_info: dict = field(default_factory=lambda: {"generation_config": {"num_return_sequences": 4}})


class UserDefinedRolloutLoop:
    """ROLL's own loop: as many responses as the context says, each with its reward, or None for a dropped prompt."""

    async def process_new_prompt(self, context):
        count = context.meta_info["generation_config"]["num_return_sequences"]
        if context.dropped:
            return None
        return [SimpleNamespace(number=i, batch=self.batch(context, i)) for i in range(count)]

    def batch(self, context, number):
        tokens = context.tokens[number]
        return {
            "response_level_rewards": context.rewards[number : number + 1],
            "response_mask": torch.tensor([[0, 0] + [1] * tokens + [0] * (4 - tokens)]),  # a prompt of 2 tokens
            "responses": torch.zeros(1, 4, dtype=torch.int64),
        }


@pytest.fixture
def roll(monkeypatch, example):
    """The recipe for ROLL, with the stand-in for its module."""
    names = ("roll", "roll.distributed", "roll.distributed.scheduler")
    for name in (*names, "roll.distributed.scheduler.user_defined_rollout_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].UserDefinedRolloutLoop = UserDefinedRolloutLoop
    return example("roll_pods")


def test_roll_keeps_the_rows_of_every_engine_and_drops_prompts_with_fewer(roll):
    loop = roll.PODSRolloutLoop()
    for rewards, tokens, kept in zip(same_rows.REWARDS, same_rows.TOKENS, KEPT, strict=True):
        values = torch.tensor([float("nan") if reward is None else reward for reward in rewards])
        responses = asyncio.run(loop.process_new_prompt(Context(values, tokens)))
        assert (responses and [response.number for response in responses]) == (kept if len(kept) == 4 else None)


def test_roll_validates_and_drops_prompts_as_before(roll):
    loop = roll.PODSRolloutLoop()
    responses = asyncio.run(loop.process_new_prompt(Context(torch.rand(N), is_val=True)))
    assert [response.number for response in responses] == [0, 1, 2, 3]
    assert asyncio.run(loop.process_new_prompt(Context(torch.rand(N), dropped=True))) is None


# -- the ledger of engines other than TRL ------------------------------------------------------------------------------


def test_the_ledger_joins_the_parts_of_a_step_in_any_order_and_forgets_old_steps(tmp_path):
    ledger = LedgerWriter(tmp_path, every=1)
    row = {"rollout": 0, "reward": 1.0, "turn_rewards": None}
    for step in (1, 2, 1, 2):
        ledger.add(step, [[row], [row]])
    for step in (1, 2):
        assert pq.read_table(tmp_path / f"step-{step:06d}.parquet")["group"].to_pylist() == [0, 1, 2, 3]
    for step in range(3, 2 + HELD_STEPS + 1):
        ledger.add(step, [[row]])
    assert sorted(ledger._rows) == list(range(3, 2 + HELD_STEPS + 1))
