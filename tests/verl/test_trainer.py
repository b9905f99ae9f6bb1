"""A step of verl's own trainer with PODS: what is generated, kept, cleared, trained and logged."""

import random

import pyarrow.parquet as pq
import pytest
import torch
import transfer_queue as tq

from pods_rl.selection import advantages, select

from .conftest import REWARDS
from .trainers import kept_sessions, left_in_queue, train_step

GROUPS = 40
# of 0, 1, 0, .3, 0, 1, .1, 0: the two highest, and the two lowest indices among the lowest
BEST = [0, 1, 2, 5]


def test_steps_generate_n_train_m_and_clear_the_rest(trainer):
    """And the metrics are of all n."""
    trainer = trainer()
    for step in range(2):
        batch, metrics = train_step(trainer)
        assert metrics["pods/all/rows"] == 16
        assert len(batch.keys) == 8
        assert list(kept_sessions(batch.keys).values()) == [BEST] * 2
        assert sorted(trainer.actor_rollout_wg.log_prob_rows[step]) == sorted(batch.keys)
        update = trainer.actor_rollout_wg.updates[step]
        assert update["padding"] == 0
        assert update["mini_batch_size"] == update["global_batch_size"] == 4  # one prompt x m = 4
        assert left_in_queue() == set(batch.keys)
        tq.kv_clear(keys=batch.keys, partition_id="train")
        trainer.global_steps += 1
    assert left_in_queue() == set()
    rewards = torch.tensor(REWARDS)
    lengths = [2 + session % 3 for session in range(8)]
    assert metrics["pods/all/reward_mean"] == pytest.approx(rewards.mean().item())
    assert metrics["pods/all/reward_std"] == pytest.approx(rewards.repeat(2).std().item())
    assert metrics["pods/selected/reward_mean"] == pytest.approx(rewards[BEST].mean().item())
    assert metrics["pods/selected/reward_std"] == pytest.approx(rewards[BEST].std().item())
    assert metrics["pods/tokens/generated"] == 2 * sum(lengths)
    assert metrics["pods/tokens/trained"] == 2 * sum(lengths[session] for session in BEST)
    assert metrics["pods/all/response_length_mean"] == pytest.approx(sum(lengths) / 8)
    assert metrics["pods/all/response_length_max"] == 4
    assert metrics["pods/zero_variance_share"] == metrics["pods/unusable_rewards"] == 0
    assert metrics["critic/score/mean"] == pytest.approx(rewards[BEST].mean().item())  # verl's own: what was trained


def test_a_kl_term_in_the_reward_is_of_the_kept_rows(trainer):
    trainer = trainer("algorithm.use_kl_in_reward=true")
    batch, metrics = train_step(trainer)
    assert list(kept_sessions(batch.keys).values()) == [BEST] * 2
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)  # -0.5 under the policy, -0.75 under the reference
    assert all(row.isfinite().all() for row in trainer.actor_rollout_wg.updates[-1]["advantages"])


def test_many_groups_have_the_rows_of_select_and_the_advantages_of_selection(trainer):
    draw = random.Random(5)
    values = [0.0, 0.25, 0.5, 1.0]
    scripts = []
    for _ in range(GROUPS):
        choices = values[: draw.randint(1, 4)]
        scripts.append({"rewards": [draw.choice(choices) for _ in range(8)]})
    trainer = trainer(
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={GROUPS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        scripts=scripts,
    )
    batch, _ = train_step(trainer)
    (update,) = trainer.actor_rollout_wg.updates
    fields = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["extra_info"])["extra_info"]
    prompt_of_uid = {}
    for key, extra in zip(batch.keys, fields, strict=True):
        prompt_of_uid[key.split("_")[0]] = getattr(extra, "data", extra)["index"]
    assert sorted(prompt_of_uid.values()) == list(range(GROUPS))
    trained = {}
    for key, row in zip(update["keys"], update["advantages"], strict=True):
        uid, session, _ = key.split("_")
        trained[prompt_of_uid[uid], int(session)] = row[0].item()

    rewards_PN = torch.tensor([script["rewards"] for script in scripts])
    selection = select(rewards_PN, 4, "max_variance")
    advantages_PM = advantages(rewards_PN, selection, epsilon=1e-6)  # verl's own
    expected = {}
    for prompt, sessions in enumerate(selection.indices.tolist()):
        for place, session in enumerate(sessions):
            expected[prompt, session] = advantages_PM[prompt, place].item()
    assert trained == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_ppo_trains_its_critic_on_m(trainer):
    trainer = trainer("algorithm.adv_estimator=gae")
    batch, metrics = train_step(trainer)
    critic, actor = trainer.actor_rollout_wg.updates
    assert critic["keys"] == actor["keys"] == batch.keys
    assert critic["mini_batch_size"] == actor["mini_batch_size"] == 4
    assert actor["padding"] == 0
    assert "critic/values/mean" in metrics


def test_a_group_with_fewer_than_m_sessions_stays_whole(trainer):
    fails = {"turns": [1, 0, 0, 1, 0, 0, 0, 1]}
    trainer = trainer(scripts=[fails, {}, {}, {}])
    batch, metrics = train_step(trainer)
    assert sorted(kept_sessions(batch.keys).values()) == [BEST, [0, 3, 7]]
    assert metrics["pods/all/rows"] == 11
    assert metrics["pods/selected/rows"] == 7
    assert trainer.actor_rollout_wg.updates[0]["padding"] == 1  # verl's own, up to a multiple of m = 4


def test_multi_turn_sessions_stay_whole(trainer):
    trainer = trainer(scripts=[{"turns": [2, 1, 3, 1, 1, 2, 1, 1]}] * 2)
    batch, metrics = train_step(trainer)
    keys = [key for key in batch.keys if not key.startswith("pad")]
    for uid, sessions in kept_sessions(keys).items():
        assert sessions == BEST
        assert sorted(key.split("_", 1)[1] for key in keys if key.startswith(uid)) == sorted(
            ["0_0", "0_1", "1_0", "2_0", "2_1", "2_2", "5_0", "5_1"]
        )
    assert metrics["pods/all/rows"] == 24
    assert left_in_queue() == set(batch.keys)


def test_dapo_filters_by_all_n_and_refills(trainer):
    constant = {"rewards": [1.0]}
    trainer = trainer(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        scripts=[constant, {}, {}, {}],
    )
    batch, metrics = train_step(trainer)
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert list(kept_sessions(batch.keys).values()) == [BEST] * 2
    assert left_in_queue() == set(batch.keys)


def test_several_batches_a_step_are_one_file_of_the_ledger(trainer, tmp_path):
    ledger = tmp_path / "rollouts"
    trainer = trainer(
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        f"trainer.v1.sampler.sampler_kwargs.ledger={ledger}",
        scripts=[{}, {"rewards": [0.5] * 8}],
    )
    batch, metrics = train_step(trainer)
    assert len(trainer.actor_rollout_wg.updates) == 2  # of one prompt each
    assert ("restore", 0) in trainer.actor_rollout_wg.models_on_cpu  # verl's own path for several updates
    assert len(batch.keys) == 8
    assert metrics["pods/zero_variance_share"] == 0.5  # verl's mean over the batches
    (file,) = ledger.iterdir()
    rows = pq.read_table(file).to_pylist()
    assert [(row["step"], row["group"], row["rollout"]) for row in rows] == [(1, i // 8, i % 8) for i in range(16)]
    assert sum(row["selected"] for row in rows) == 8
    rewards = [[row["reward"] for row in rows if row["group"] == group] for group in (0, 1)]
    assert sorted(rewards) == [pytest.approx(REWARDS), pytest.approx([0.5] * 8)]


def test_the_ledger_has_every_session_of_the_first_and_each_tenth_step(trainer, tmp_path):
    ledger = tmp_path / "rollouts"
    trainer = trainer(f"trainer.v1.sampler.sampler_kwargs.ledger={ledger}")
    for step in (1, 2, 10):
        trainer.global_steps = step
        batch, _ = train_step(trainer)
        tq.kv_clear(keys=batch.keys, partition_id="train")
    assert sorted(path.name for path in ledger.iterdir()) == ["step-000001.parquet", "step-000010.parquet"]
    rows = pq.read_table(ledger / "step-000010.parquet").to_pylist()
    assert [(row["step"], row["group"], row["rollout"]) for row in rows] == [(10, i // 8, i % 8) for i in range(16)]
    assert [row["reward"] for row in rows] == pytest.approx(REWARDS * 2)
    assert [row["rollout"] for row in rows if row["selected"]] == BEST * 2
    assert [row["completion_tokens"] for row in rows] == [2 + i % 3 for i in range(8)] * 2
    assert [row["turn_rewards"] for row in rows] == [[REWARDS[i]] if i % 2 else None for i in range(8)] * 2
    assert {row["answer"] for row in rows} == {"1"}
    assert all(len(row["completion"]) == row["completion_tokens"] for row in rows)
