"""What is refused before a model loads, and in which words; the manager's request for n; verl's own surface."""

from __future__ import annotations

import inspect

import pytest
from tensordict import NonTensorData, TensorDict
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.config import validate_config

from pods_rl.engines.verl.agent_loop import PODSAgentLoopManager
from pods_rl.engines.verl.replay_buffer import pods_before
from pods_rl.engines.verl.settings import PODSSettings, read_settings
from pods_rl.errors import UserError
from pods_rl.selection.rules import percentile

KWARGS = "trainer.v1.sampler.sampler_kwargs"


def test_settings_are_read_from_verls_configuration(make_config):
    config = make_config(f"{KWARGS}.rule=percentile", f"{KWARGS}.seed=5")
    expected = PODSSettings(
        num_rollouts=8,
        num_generations=4,
        rule=percentile,
        seed=5,
        before=False,
        filter_arguments={
            "filter_groups_metric": None,
            "sync_refill_failed_groups": False,
            "train_batch_size": 2,
            "gen_batch_size": 2,
            "max_inflight_gen_batches": 1,
        },
    )
    assert read_settings(config) == expected


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "pods_before"])
def test_verl_accepts_the_shipped_configuration(make_config, estimator):
    config = make_config(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


REFUSED = [
    ([f"{KWARGS}.rule=max_varience"], "max_varience"),
    ([f"+{KWARGS}.num_rolouts=64"], "unknown key 'num_rolouts', expected num_rollouts, rule, seed, ledger, "),
    ([f"{KWARGS}.num_rollouts=3"], "got n = 3 and m = 4"),
    ([f"{KWARGS}.num_rollouts=many"], "must be a whole number of at least 1; got 'many'"),
    ([f"~{KWARGS}.num_rollouts"], "must be a whole number of at least 1; got None"),
    ([f"{KWARGS}.seed=1.5"], "seed must be a whole number of at least 0; got 1.5"),
    ([f"{KWARGS}.ledger_every=0"], "ledger_every must be a whole number of at least 1; got 0"),
    (["actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"], "Set it to pods_rl.engines.verl.agent_loop"),
    (["trainer.v1.sampler.custom_sampler.name=null"], "verl would train on all 8 sessions of a prompt"),
    (["trainer.use_v1=false"], "legacy trainer has no replay buffer"),
    (["reward.reward_model.enable=true"], "a colocated reward model scores after the batch is sampled"),
    (["algorithm.adv_estimator=pods_before", "algorithm.use_kl_in_reward=true"], "needs algorithm.use_kl_in_reward"),
    (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=null"], "needs algorithm.filter_groups"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_work_is_refused(make_config, overrides, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(".", r"\.")):
        read_settings(make_config(*overrides))


def test_rows_that_our_reward_function_cannot_score_are_refused(make_config):
    function = "reward.custom_reward_function"
    ours = (f"{function}.path=pkg://pods_rl.tasks.scoring", f"{function}.name=compute_score")
    for other in ("data.train_files=[elsewhere.parquet]", "data.val_files=[elsewhere.parquet]"):
        with pytest.raises(UserError, match=r"train\.parquet: the column data_source is 'scripted'; expected the task"):
            read_settings(make_config(*ours, other))


def test_the_reward_as_the_filters_metric_is_refused_where_verl_does_not_know_it(make_config, monkeypatch):
    known = "verl.trainer.ppo.v1.replay_buffer.FILTER_GROUPS_REWARD_METRIC"
    monkeypatch.setattr(known, "reward", raising=False)  # as in 0.9.1
    filtered = make_config("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")
    assert read_settings(filtered).filter_arguments["filter_groups_metric"] == "reward"
    monkeypatch.delattr(known)  # as in 0.9.0
    with pytest.raises(UserError, match="filters only by numbers that the reward function returns"):
        read_settings(filtered)
    filtered.algorithm.filter_groups.metric = "acc"
    assert read_settings(filtered).filter_arguments["filter_groups_metric"] == "acc"


def test_verls_own_buffer_arguments_are_passed_on(make_config):
    filtered = make_config(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_inflight_gen_batches=3",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
    )
    assert read_settings(filtered).filter_arguments == {
        "filter_groups_metric": "acc",
        "sync_refill_failed_groups": True,
        "train_batch_size": 2,
        "gen_batch_size": 1,
        "max_inflight_gen_batches": 3,
    }


def test_a_reward_model_with_its_own_pool_is_accepted(make_config):
    read_settings(make_config("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true"))


@pytest.fixture
def asked(make_config, monkeypatch):
    """The numbers that reach two workers, of a batch of two prompts with the given columns."""
    seen = []
    monkeypatch.setattr(AgentLoopManagerTQ, "generate_sequences", lambda self, prompts: seen.append(prompts))
    manager = PODSAgentLoopManager(make_config(), llm_client=None)

    def ask(**columns):
        batch = TensorDict({"index": [0, 1]}, batch_size=[2])
        for name, value in columns.items():
            batch[name] = NonTensorData(value)
        manager.generate_sequences(batch)
        assert ("__rollout_n__" in batch) == ("__rollout_n__" in columns)  # the trainer's own batch is left alone
        return [chunk["__rollout_n__"] for chunk in seen[-1].chunk(2) if "__rollout_n__" in chunk]

    return ask


def test_training_prompts_are_asked_for_n_and_no_others(asked):
    assert asked() == asked(validate=False) == [8, 8]
    assert asked(validate=True) == []
    assert asked(__rollout_n__=3) == [3, 3]  # the data set's own number


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_verls_surface_is_as_overridden():
    for buffer in (ReplayBuffer, ReplayBufferAsync):
        assert parameters(buffer.sample) == ["self", "global_steps", "partition_id", "batch_size"]
        assert parameters(buffer._materialize_batch) == [
            "self",
            "partition_id",
            "selected_prompt_uids",
            "partition_snapshot",
        ]
        assert {
            "sampler_kwargs",
            "filter_groups_metric",
            "train_batch_size",
            "gen_batch_size",
            "max_inflight_gen_batches",
            "sync_refill_failed_groups",
            "poll_interval",
        } <= set(parameters(buffer.__init__))
    assert parameters(AgentLoopManagerTQ.generate_sequences) == ["self", "prompts"]
    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert '"__rollout_n__"' in inspect.getsource(worker._run_prompt)
    assert core_algos.get_adv_estimator_fn("pods_before") is pods_before
