"""The replay buffers on the real queue, groups put there by hand: rules, hostile rewards, the filter's arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from pods_rl.engines.verl.replay_buffer import PODSReplayBuffer, PODSReplayBufferAsync, pods_before, replay_buffer
from pods_rl.selection import select

from .conftest import REWARDS
from .trainers import kept_sessions, left_in_queue

pytestmark = pytest.mark.usefixtures("empty_queue")


def put_group(uid: str, rewards: list[float], partition: str = "train") -> None:
    """A finished group of one trajectory a session."""
    keys = [f"{uid}_{session}_0" for session in range(len(rewards))]
    scores = torch.nested.as_nested_tensor([torch.tensor([0.0, value]) for value in rewards], layout=torch.jagged)
    tags = [{"status": "success", "response_len": 2, "seq_len": 5, "global_steps": 1} for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=tu.get_tensordict({"rm_scores": scores}), tags=tags)
    tq.kv_put(key=uid, partition_id=partition, tag={"is_prompt": True, "status": "finished", "global_steps": 1})


@pytest.fixture
def make_buffer(make_config):
    def make(*overrides: str, mode: str = "sync"):
        sampler = make_config(*overrides).trainer.v1.sampler
        buffer = replay_buffer(
            trainer_mode=mode,
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=lambda count: count,
        )
        buffer.poll_interval = 0.01
        return buffer

    return make


def sample(buffer, prompts: int, partition: str = "train", step: int = 1):
    return buffer.sample(global_steps=step, partition_id=partition, batch_size=prompts)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "percentile", "random"])
def test_every_rule_in_every_mode(make_buffer, rule, mode):
    buffer = make_buffer(f"trainer.v1.sampler.sampler_kwargs.rule={rule}", mode=mode)
    assert type(buffer) is (PODSReplayBuffer if mode == "sync" else PODSReplayBufferAsync)
    put_group("a", REWARDS)
    batch, _ = sample(buffer, 1, step=3)
    generator = torch.Generator().manual_seed(3)
    expected = select(torch.tensor([REWARDS], dtype=torch.float64), 4, rule, generator).indices[0].tolist()
    assert kept_sessions(batch.keys) == {"a": expected}
    assert left_in_queue() == set(batch.keys)
    assert len(batch.tags) == 4


def test_a_drawing_rule_repeats_with_its_seed_and_differs_by_step(make_buffer):
    rule = "trainer.v1.sampler.sampler_kwargs.rule=random"
    seen = []
    for seed, step in [(0, 1), (0, 1), (1, 1), (0, 2)]:
        buffer = make_buffer(rule, f"trainer.v1.sampler.sampler_kwargs.seed={seed}")
        put_group("a", REWARDS * 4)
        batch, _ = sample(buffer, 1, step=step)
        seen.append(kept_sessions(batch.keys)["a"])
        tq.kv_clear(keys=batch.keys, partition_id="train")
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert seen[0] != seen[3]


def test_unusable_rewards_are_dropped_and_counted(make_buffer):
    buffer = make_buffer()
    put_group("a", [math.nan, 0.0, 1.0, math.inf, 0.5])
    put_group("b", [1.0, 0.0, 1e20, 0.0, 0.0, 1.0])
    put_group("c", [math.nan] * 8)
    batch, metrics = sample(buffer, 3)
    assert kept_sessions(batch.keys) == {"a": [1, 2, 4], "b": [0, 1, 3, 5]}
    assert metrics["pods/unusable_rewards"] == 11
    assert left_in_queue() == set(batch.keys)


def test_a_batch_without_a_usable_reward_is_refused(make_buffer):
    buffer = make_buffer()
    put_group("a", [math.nan] * 8)
    with pytest.raises(RuntimeError, match="none of the 8 rows sampled has a usable reward"):
        sample(buffer, 1)


def test_groups_not_sampled_stay_as_they_are(make_buffer):
    buffer = make_buffer()
    put_group("a", REWARDS)
    put_group("b", REWARDS)
    batch, _ = sample(buffer, 1)
    (other,) = {"a", "b"} - set(kept_sessions(batch.keys))
    assert {key for key in left_in_queue() if key.startswith(other)} == {other, *(f"{other}_{i}_0" for i in range(8))}


def test_before_refuses_groups_it_did_not_sample(make_buffer):
    buffer = make_buffer("algorithm.adv_estimator=pods_before")
    put_group("a", REWARDS)
    sample(buffer, 1)
    scores, mask = torch.tensor([[0.0, 1.0], [0.0, 0.3]]), torch.ones(2, 2)
    known, _ = pods_before(scores, mask, np.array(["a", "a"], dtype=object))
    assert known[0, 0] > known[1, 0] > 0
    with pytest.raises(ValueError, match="has no rewards of prompt b"):
        pods_before(scores, mask, np.array(["a", "b"], dtype=object))
    padded, _ = pods_before(scores, torch.tensor([[1, 1], [0, 0]]), np.array(["a", "pad1"], dtype=object))
    assert padded[1].tolist() == [0.0, 0.0]
