"""The layers of PODSTrainer by themselves: each is TRL's trainer with one thing more."""

import pytest
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer, PrefixTreeTrainer
from pods_rl.engines.trl.guarded.trainer import Guarded
from pods_rl.engines.trl.selecting.trainer import Selecting
from pods_rl.errors import UserError

from .conftest import assert_equal_weights, letter_reward

EXACT = {"exact_trl": True, "max_steps": 3}


def trained(make, trainer_class, **config):
    trainer = make(trainer_class, **config)
    trainer.train()
    return trainer


def shared_log(trainer, other):
    """The lines of a log, as far as the other's has the same names, without times."""
    rows = []
    for row, others in zip(trainer.state.log_history[:-1], other.state.log_history[:-1], strict=True):
        names = [name for name in row if name in others and "time" not in name and "seconds" not in name]
        rows.append({name: row[name] for name in names})
    assert "reward" in rows[0]
    return rows


def test_selecting_alone_is_pods_trainer_with_exact_trl(make_trainer):
    settings = {"num_rollouts": 8, "beta": 0.1, "num_iterations": 2, "advantages": "before"}
    alone = trained(make_trainer, Selecting, **EXACT, **settings)
    together = trained(make_trainer, PODSTrainer, **EXACT, **settings)
    assert_equal_weights(alone, together)
    assert shared_log(alone, together) == shared_log(together, alone)
    assert alone.rollouts.columns() == together.rollouts.columns()


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.1, "num_iterations": 2}, {"gradient_accumulation_steps": 2, "prefix_tree": False}],
    ids=", ".join,
)
def test_the_cheaper_step_alone_is_pods_trainer_at_n_equal_to_m(make_trainer, settings):
    alone = trained(make_trainer, PrefixTreeTrainer, max_steps=3, **settings)
    together = trained(make_trainer, PODSTrainer, max_steps=3, **settings)
    assert_equal_weights(alone, together)
    assert shared_log(alone, together) == shared_log(together, alone)


def test_the_cheaper_step_takes_the_configuration_of_plain_grpo_and_selects_nothing(make_trainer):
    plain = trained(make_trainer, PrefixTreeTrainer, config_class=GRPOConfig)
    ours = trained(make_trainer, PrefixTreeTrainer, config_class=PODSConfig)
    assert_equal_weights(plain, ours)
    assert "over trees" in plain.attention or not plain.attention.startswith("rows")
    assert plain.state.log_history[0]["pods/tokens/computed"] > 0
    with pytest.raises(UserError, match="num_rollouts"):
        make_trainer(PrefixTreeTrainer, num_rollouts=8)


def test_a_guarded_trainer_alone_is_trl_s_and_checks_rewards(make_trainer):
    alone = trained(make_trainer, Guarded, max_steps=3)
    assert_equal_weights(alone, trained(make_trainer, GRPOTrainer, config_class=GRPOConfig, max_steps=3))

    def broken(completions, **_):
        raise KeyError("gold")

    trainer = trained(make_trainer, Guarded, reward=broken, reward_errors="zero", max_steps=1)
    assert trainer.state.log_history[0]["pods/reward_errors"] == 8


def test_an_evaluation_calls_each_layer_once(make_trainer):
    rewards = []

    def counting(completions, **columns):
        rewards.append(len(completions))
        return letter_reward(completions)

    trainer = make_trainer(reward=counting, num_rollouts=8)
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert rewards == [8]  # 2 prompts of num_generations_eval
