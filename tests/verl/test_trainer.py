"""A step of verl's own trainer with PODS: what is generated, kept, cleared, trained and logged."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import transfer_queue as tq

from pods_rl.selection import Selection, advantages, pods_objective

from .conftest import REWARDS
from .trainers import kept_sessions, left_in_queue, train_step

# of 0, 1, 0, .3, 0, 1, .1, 0: the two highest, and the two lowest indices among the lowest
BEST = [0, 1, 2, 5]


def advantage_of_session(batch, update) -> dict[int, float]:
    """Session number -> its advantage, from the first token that is trained."""
    found = {}
    for key, row in zip(update["keys"], update["data"]["advantages"], strict=True):
        if not key.startswith("pad"):
            found[int(key.rsplit("_", 2)[1])] = row[0].item()
    return found


def test_steps_generate_n_train_m_and_clear_the_rest(trainer):
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


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_loss_denominators_count_what_was_kept(trainer, mode):
    trainer = trainer("actor_rollout_ref.actor.ppo_mini_batch_size=2", f"actor_rollout_ref.actor.loss_agg_mode={mode}")
    train_step(trainer)
    (update,) = trainer.actor_rollout_wg.updates
    mask = torch.nn.utils.rnn.pad_sequence(update["data"]["response_mask"], batch_first=True)
    advantage = torch.nn.utils.rnn.pad_sequence(update["data"]["advantages"], batch_first=True)[:, 0]
    ratio = torch.tensor(0.1).exp()  # within the clip: the loss of a token is -ratio x advantage
    tokens = mask.sum(dim=1)
    expected = {
        "token-mean": -(ratio * advantage * tokens).sum() / tokens.sum(),
        "seq-mean-token-mean": pods_objective(
            torch.full((2, 4, mask.shape[1]), -0.4),
            torch.full((2, 4, mask.shape[1]), -0.5),
            advantage.view(2, 4),
            mask.view(2, 4, -1),
        ),
        "seq-mean-token-sum": -(ratio * advantage * tokens).sum() / 8,  # 2 prompts x m = 4, not 16
    }[mode]
    assert len(tokens) == 8
    assert update["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", lambda kept, all_: (kept - kept.mean()) / (kept.std() + 1e-6)),
        ("rloo", lambda kept, all_: (kept - kept.mean()) * 4 / 3),  # against the mean of the 3 others that were kept
        (
            "pods_before",
            lambda kept, all_: advantages(all_[None], Selection(torch.tensor([BEST])), when="before")[0],
        ),
    ],
)
def test_advantages_of_each_estimator(trainer, estimator, expected):
    trainer = trainer(f"algorithm.adv_estimator={estimator}")
    batch, _ = train_step(trainer)
    found = advantage_of_session(batch, trainer.actor_rollout_wg.updates[0])
    rewards = torch.tensor(REWARDS)
    for session, value in zip(BEST, expected(rewards[BEST], rewards).tolist(), strict=True):
        assert found[session] == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_before_only_centres_without_norm_adv_by_std(trainer):
    trainer = trainer("algorithm.adv_estimator=pods_before", "algorithm.norm_adv_by_std_in_grpo=false")
    batch, _ = train_step(trainer)
    found = advantage_of_session(batch, trainer.actor_rollout_wg.updates[0])
    assert found[1] == pytest.approx(1.0 - sum(REWARDS) / 8, rel=1e-4, abs=1e-6)


def test_ppo_trains_its_critic_on_m(trainer):
    trainer = trainer("algorithm.adv_estimator=gae")
    batch, metrics = train_step(trainer)
    critic, actor = trainer.actor_rollout_wg.updates
    assert critic["keys"] == actor["keys"] == batch.keys
    assert critic["mini_batch_size"] == actor["mini_batch_size"] == 4
    assert actor["padding"] == 0
    assert "critic/values/mean" in metrics


def test_validation_is_untouched(trainer):
    trainer = trainer("trainer.log_val_generations=0")
    sampled = []
    sample = trainer.replay_buffer.sample
    trainer.replay_buffer.sample = lambda **given: sampled.append(sample(**given)) or sampled[-1]
    metrics = trainer._validate()
    ((batch, logged),) = sampled
    assert list(kept_sessions(batch.keys).values()) == [[0, 1, 2]] * 4  # val_kwargs.n = 3 of all four prompts
    assert not any(name.startswith("pods/") for name in logged)
    assert metrics["val-core/scripted/reward/mean@3"] == pytest.approx(1 / 3)
    assert left_in_queue("val") == set()


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


def test_metrics_cover_all_n(trainer):
    trainer = trainer()
    _, metrics = train_step(trainer)
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


def test_dapo_filters_by_all_n_and_refills(trainer):
    constant = {"rewards": [1.0]}
    trainer = trainer(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
        scripts=[constant, {}, {}, {}],
    )
    batch, metrics = train_step(trainer)
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert list(kept_sessions(batch.keys).values()) == [BEST] * 2
    assert left_in_queue() == set(batch.keys)


def test_asynchronous_mode(trainer):
    trainer = trainer("trainer.v1.trainer_mode=colocate_async")
    assert type(trainer.replay_buffer).__name__ == "PODSReplayBufferAsync"
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None, abort_replicas=lambda: None)
    batch, metrics = train_step(trainer)
    assert list(kept_sessions(batch.keys).values()) == [BEST] * 2
    assert metrics["pods/all/rows"] == 16
    assert not {key for key in left_in_queue() if key.split("_")[0] in kept_sessions(batch.keys)} - set(batch.keys)


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
