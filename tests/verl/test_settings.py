"""What is read from verl's configuration, and what is refused before a model loads."""

import re

import pytest
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from pods_rl.engines.verl.agent_loop import PODSAgentLoopManager
from pods_rl.engines.verl.replay_buffer import PODSReplayBuffer
from pods_rl.engines.verl.settings import GROUP_ESTIMATORS, VerlSettings, read_settings
from pods_rl.errors import UserError
from pods_rl.selection import BATCH_RULES
from pods_rl.selection.rules import percentile

KWARGS = "trainer.v1.sampler.sampler_kwargs"
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
SAMPLER = "trainer.v1.sampler.custom_sampler"


def test_settings_are_read_from_verls_configuration(make_config):
    """With the arguments that verl passes to a replay buffer of its own."""
    config = make_config(
        f"{KWARGS}.rule=percentile",
        f"{KWARGS}.seed=5",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_inflight_gen_batches=3",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
    )
    expected = VerlSettings(
        num_rollouts=8,
        num_generations=4,
        rule=percentile,
        seed=5,
        filter_arguments={
            "filter_groups_metric": "acc",
            "sync_refill_failed_groups": True,
            "train_batch_size": 2,
            "gen_batch_size": 1,
            "max_inflight_gen_batches": 3,
        },
    )
    assert read_settings(config) == expected


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_verl_accepts_the_shipped_configuration(make_config, estimator):
    config = make_config(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


# Overrides, and a key or a value that the error names. What every engine reads alike is in tests/skyrl.
REFUSED = [
    ([f"{KWARGS}.selection=batch", f"{KWARGS}.rule=percentile"], "percentile"),
    ([f"{KWARGS}.selection=batch", "data.train_batch_size=1"], "data.train_batch_size"),
    ([f"{KWARGS}.poll_interval=0"], "poll_interval"),
    ([f"{KWARGS}.check_data=nowhere:check"], "nowhere:check"),
    ([f"{MANAGER}=null"], "agent_loop_manager_class"),
    ([f"{MANAGER}=verl.trainer.ppo.v1.AgentLoopManagerTQ"], "AgentLoopManagerTQ"),
    ([f"{SAMPLER}.name=null"], "custom_sampler"),
    ([f"{SAMPLER}.path=pkg://verl.trainer.ppo.v1.replay_buffer", f"{SAMPLER}.name=ReplayBuffer"], "is ReplayBuffer"),
    (["trainer.use_v1=false"], "use_v1"),
    (["reward.reward_model.enable=true"], "enable_resource_pool"),
    (["algorithm.adv_estimator=grpo_passk"], "grpo_passk"),
    (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=null"], "algorithm.filter_groups"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_work_is_refused(make_config, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_settings(make_config(*overrides))


class DerivedManager(PODSAgentLoopManager):
    """A user's own, derived from ours."""


class DerivedBuffer(PODSReplayBuffer):
    """Likewise."""


def test_plug_ins_derived_from_ours_and_a_reward_model_with_its_own_pool_are_accepted(make_config):
    read_settings(make_config("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true"))
    here = "tests.verl.test_settings"
    read_settings(
        make_config(f"{MANAGER}={here}.DerivedManager", f"{SAMPLER}.path=pkg://{here}", f"{SAMPLER}.name=DerivedBuffer")
    )


def test_one_kept_session_is_refused_where_kept_sessions_are_compared(make_config):
    config = make_config("actor_rollout_ref.rollout.n=1")
    for estimator in GROUP_ESTIMATORS:
        config.algorithm.adv_estimator = estimator
        with pytest.raises(UserError, match=rf" algorithm\.adv_estimator={estimator} "):
            read_settings(config)


def test_a_mean_of_one_session_is_accepted_over_the_batch(make_config):
    """A prompt keeps none or at least two."""
    settings = read_settings(make_config("actor_rollout_ref.rollout.n=1", f"{KWARGS}.selection=batch"))
    assert settings.num_generations == 1
    assert settings.batch_rule is BATCH_RULES["max_variance"]


noted: list[tuple[list[object], str]] = []


def test_a_users_own_data_check_gets_the_files_and_the_column(make_config):
    noted.clear()
    config = make_config(f"{KWARGS}.check_data=tests.verl.test_settings:note_data", "data.reward_fn_key=source")
    read_settings(config)
    assert noted == [([config.data.train_files, config.data.val_files], "source")]


def note_data(files, column):
    noted.append((files, column))


def test_rows_that_our_reward_function_cannot_score_are_refused(make_config):
    ours = "pods=[default,graders]"
    function = make_config(ours).reward.custom_reward_function
    assert (function.path, function.name) == ("pkg://pods_rl.tasks.scoring", "compute_score")
    read_settings(make_config())  # another reward function may know the rows
    for other in ("data.train_files=[elsewhere.parquet]", "data.val_files=[elsewhere.parquet]"):
        with pytest.raises(UserError, match=r"train\.parquet: .*data_source .*'scripted'"):
            read_settings(make_config(ours, other))


def test_the_reward_as_the_filters_metric_is_refused_where_verl_does_not_know_it(make_config, monkeypatch):
    known = "verl.trainer.ppo.v1.replay_buffer.FILTER_GROUPS_REWARD_METRIC"
    monkeypatch.setattr(known, "reward", raising=False)  # as in 0.9.1
    filtered = make_config("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")
    assert read_settings(filtered).filter_arguments["filter_groups_metric"] == "reward"
    monkeypatch.delattr(known)  # as in 0.9.0
    with pytest.raises(UserError, match="filter_groups"):
        read_settings(filtered)
    filtered.algorithm.filter_groups.metric = "acc"
    assert read_settings(filtered).filter_arguments["filter_groups_metric"] == "acc"
