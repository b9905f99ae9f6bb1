"""The replay buffers on the real queue, groups put there by hand: rules, hostile rewards, the filter's arguments."""

import math

import pytest
import torch
import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from pods_rl.engines.seeds import seeded_generator
from pods_rl.engines.verl.replay_buffer import PODSReplayBuffer, PODSReplayBufferAsync, replay_buffer
from pods_rl.errors import UserError
from pods_rl.selection import select

from ..engines import same_rows
from .conftest import REWARDS
from .trainers import kept_sessions, left_in_queue

pytestmark = pytest.mark.usefixtures("empty_queue")


def put_group(
    uid: str,
    rewards: list[float],
    partition: str = "train",
    status: str = "finished",
    tokens: list[int] | None = None,
) -> None:
    """A group of one trajectory a session, of which no more comes; `tokens` of each are in the loss, by default 2."""
    keys = [f"{uid}_{session}_0" for session in range(len(rewards))]
    scores = torch.nested.as_nested_tensor([torch.tensor([0.0, value]) for value in rewards], layout=torch.jagged)
    tags = [{"status": "success", "response_len": 2, "seq_len": 5, "global_steps": 1} for _ in keys]
    rows = [torch.tensor([1] * count + [0] * (2 - count)) for count in tokens or [2] * len(rewards)]
    fields = {"rm_scores": scores, "response_mask": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=tu.get_tensordict(fields), tags=tags)
    tq.kv_put(key=uid, partition_id=partition, tag={"is_prompt": True, "status": status, "global_steps": 1})


@pytest.fixture
def make_buffer(make_config):
    def make(*overrides: str, mode: str = "sync"):
        sampler = make_config(f"trainer.v1.trainer_mode={mode}", *overrides).trainer.v1.sampler
        buffer = replay_buffer(
            trainer_mode=mode,
            trainer_config={},
            max_off_policy_threshold=8,  # an integer: versions other than 0.9.1 refuse null
            max_off_policy_strategy="drop",
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=lambda count: count,
        )
        buffer.poll_interval = 0.01
        return buffer

    return make


def sample(buffer, prompts: int, partition: str = "train", step: int = 1):
    return buffer.sample(global_steps=step, partition_id=partition, batch_size=prompts)


@pytest.mark.parametrize(
    ("rule", "mode"), [("random", "sync"), ("max_variance", "colocate_async"), ("percentile", "separate_async")]
)
def test_a_rule_in_every_mode(make_buffer, rule, mode):
    buffer = make_buffer(f"trainer.v1.sampler.sampler_kwargs.rule={rule}", mode=mode)
    assert type(buffer) is (PODSReplayBuffer if mode == "sync" else PODSReplayBufferAsync)
    put_group("a", REWARDS)
    batch, _ = sample(buffer, 1, step=3)
    generator = seeded_generator(0, 3)
    expected = select(torch.tensor([REWARDS], dtype=torch.float64), 4, rule, generator).indices[0].tolist()
    assert kept_sessions(batch.keys) == {"a": expected}
    assert left_in_queue() == set(batch.keys)
    assert len(batch.tags) == 4


@pytest.mark.parametrize(("selection", "kept"), [("prompt", same_rows.KEPT), ("batch", same_rows.KEPT_OF_BATCH)])
def test_the_rows_of_every_engine_are_kept(make_buffer, selection, kept):
    """As `tests/engines/test_same_rows.py` has them for the others; a group may keep fewer than m, or none.

    A single usable session is not kept, because verl would train it with its raw reward.
    """
    buffer = make_buffer(f"trainer.v1.sampler.sampler_kwargs.selection={selection}")
    for group, (rewards, tokens) in enumerate(zip(same_rows.REWARDS, same_rows.TOKENS, strict=True)):
        values = [math.nan if reward is None else reward for reward in rewards]
        put_group(f"g{group}", values, tokens=[min(count, 2) for count in tokens])
    batch, metrics = sample(buffer, len(same_rows.KEPT))
    found = kept_sessions(batch.keys)
    assert [found.get(f"g{group}", []) for group in range(len(kept))] == [*kept[:6], [], []]
    places = [(group, i) for group in range(len(kept)) for i in range(same_rows.N)]
    assert metrics["pods/unusable_rewards"] == sum(not same_rows.usable(*place) for place in places)
    if selection == "batch":
        assert left_in_queue() == set(batch.keys)
        assert metrics["pods/selected/rows"] == 32
        assert metrics["pods/prompts_trained"] == 5
        assert metrics["pods/rows_a_prompt"] == 32 / 5
        assert metrics["pods/zero_variance_share"] == 0


def test_the_batches_of_one_step_draw_different_sessions_and_repeat_with_the_seed(make_buffer):
    rule = "trainer.v1.sampler.sampler_kwargs.rule=random"
    runs = []
    for _ in range(2):
        buffer = make_buffer(rule, mode="separate_async")  # 4 batches a step
        drawn = []
        for batch_number in range(4):
            put_group(f"a{batch_number}", REWARDS * 4)
            batch, _ = sample(buffer, 1, step=7)
            drawn += kept_sessions(batch.keys).values()
            tq.kv_clear(keys=batch.keys, partition_id="train")
        runs.append(drawn)
    assert runs[0] == runs[1]
    assert len({tuple(sessions) for sessions in runs[0]}) == 4


def test_a_validation_keeps_every_session(make_buffer):
    buffer = make_buffer("trainer.v1.separate_async.parameter_sync_step=2", mode="separate_async")
    put_group("a", REWARDS)
    sample(buffer, 1, step=3)
    put_group("v", REWARDS, partition="val")
    validation, logged = sample(buffer, 1, partition="val", step=2)
    assert kept_sessions(validation.keys) == {"v": list(range(8))}
    assert logged == {}


def test_a_first_batch_of_m_sessions_a_group_is_refused(make_buffer):
    buffer = make_buffer()
    put_group("a", [0.0, 1.0, 0.5, 0.0])
    put_group("b", [0.0, 1.0, 0.5, 0.0])
    with pytest.raises(UserError, match="has 4 "):
        sample(buffer, 2)
    equal = make_buffer("trainer.v1.sampler.sampler_kwargs.num_rollouts=4")  # n = m: plain GRPO, as asked
    put_group("c", [0.0, 1.0, 0.5, 0.0])
    batch, _ = sample(equal, 1)
    assert kept_sessions(batch.keys) == {"c": [0, 1, 2, 3]}


def test_a_first_batch_of_failed_groups_and_later_small_groups_are_accepted(make_buffer):
    buffer = make_buffer()
    put_group("a", [0.0, 1.0, 0.5, 0.0], status="failure")  # the others of its 8 sessions failed
    batch, _ = sample(buffer, 1)
    assert kept_sessions(batch.keys) == {"a": [0, 1, 2, 3]}
    put_group("b", [0.0, 1.0, 0.5, 0.0])
    batch, _ = sample(buffer, 1)
    assert kept_sessions(batch.keys) == {"b": [0, 1, 2, 3]}


def test_a_batch_without_a_usable_reward_is_refused(make_buffer):
    buffer = make_buffer()
    put_group("a", [math.nan] * 8)
    with pytest.raises(RuntimeError, match="the 8 rows"):
        sample(buffer, 1)


def test_the_ledger_loads_its_tokenizer_with_verls_options(make_buffer, tmp_path, monkeypatch):
    given = []
    loader = "pods_rl.engines.verl.replay_buffer.hf_tokenizer"
    monkeypatch.setattr(loader, lambda path, **options: given.append((path, options)))
    model = "actor_rollout_ref.model"
    ledger = f"trainer.v1.sampler.sampler_kwargs.ledger={tmp_path}/rollouts"
    make_buffer(ledger, f"{model}.trust_remote_code=true", f"{model}.tokenizer_path={tmp_path}")
    assert given == [(str(tmp_path), {"trust_remote_code": True})]


def test_groups_not_sampled_stay_as_they_are(make_buffer):
    buffer = make_buffer()
    put_group("a", REWARDS)
    put_group("b", REWARDS)
    batch, _ = sample(buffer, 1)
    (other,) = {"a", "b"} - set(kept_sessions(batch.keys))
    assert {key for key in left_in_queue() if key.startswith(other)} == {other, *(f"{other}_{i}_0" for i in range(8))}
