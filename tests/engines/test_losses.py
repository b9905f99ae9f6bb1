"""TRL's losses with selection: n = m is TRL to the last bit, and m of n is TRL fed exactly the m kept rows.

The oracle is TRL's own trainer. Its sampler is replaced by the rows that PODSTrainer kept, so that whatever divides by
a number of rows, groups or tokens must have counted those m alone.
"""

from __future__ import annotations

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from pods_rl import PODSConfig
from pods_rl.engines.trl.batching import check_losses
from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields
from tests.numeric import FLOAT32, assert_near

from .test_equivalence import PLAIN, weights

# Each loss as its paper sets it, with the settings under which TRL would divide by something else.
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "DAPO": {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}
OTHERS = {
    "KL": {"beta": 0.04},
    "the most uncertain tokens": {"top_entropy_quantile": 0.3, "loss_type": "dapo"},
    "two-sided clipping": {"delta": 1.5},
    "entropy bonus": {"entropy_coef": 0.01},
}
# A step of one micro-batch; accumulated, several steps and passes over a generation, so that ratios leave 1.
ONCE = {"per_device_train_batch_size": 8, "max_steps": 1}
OFTEN = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_iterations": 2,
    "max_steps": 3,
}  # fmt: skip


def kept_rows(trainer):
    """Filled as it trains: of each generation the completions that are trained, as token ids."""
    rows, shorten = [], trainer._shorten

    def record(*given):
        trained = shorten(*given)
        rows.append([list(ids) for ids in trained[1]])
        torch.manual_seed(len(rows))  # TRL shuffles the rows next, and sampling has drawn from the same generator
        return trained

    trainer._shorten = record
    return rows


def fed(trainer, rows):
    """A trainer whose sampler gives these completions, generation by generation."""
    given = enumerate(rows, start=1)

    def sample(*args, **kwargs):
        number, completion_ids = next(given)
        torch.manual_seed(number)
        return completion_ids, None

    trainer._generate_single_turn = sample
    return trainer


def train(trainer):
    """Weights and logs of a run."""
    trainer.train()
    return weights(trainer), [row for row in trainer.state.log_history if "loss" in row]


def of_n_and_of_m(make_trainer, config):
    """A run on 4 of 12 rollouts, and TRL's run on those 4."""
    trainer = make_trainer(num_rollouts=12, **PLAIN, **config)
    rows = kept_rows(trainer)
    ours = train(trainer)
    ours_only = ("advantages", "advantage_baseline")
    theirs = {key: value for key, value in config.items() if key not in ours_only}
    return ours, train(fed(make_trainer(GRPOTrainer, GRPOConfig, **theirs), rows))


def assert_same_run(ours, theirs):
    (our_weights, our_logs), (their_weights, their_logs) = ours, theirs
    for name, weight in their_weights.items():
        assert torch.equal(weight, our_weights[name]), name
    for our_row, their_row in zip(our_logs, their_logs, strict=True):
        assert their_row["grad_norm"] > 0
        for name in ("loss", "grad_norm", "kl", "entropy", *(key for key in their_row if "clip" in key)):
            if name in their_row and not name.startswith("completions/"):
                assert our_row[name] == their_row[name], name


@pytest.mark.parametrize("schedule", [ONCE, OFTEN], ids=["once", "often"])
@pytest.mark.parametrize("loss", LOSSES | OTHERS)
def test_m_of_n_is_trl_on_those_m(make_trainer, loss, schedule):
    assert_same_run(*of_n_and_of_m(make_trainer, (LOSSES | OTHERS)[loss] | schedule))


def test_every_loss_that_a_recipe_may_name_is_in_the_table():
    assert set(fields()["loss_type"].choices) == {loss["loss_type"] for loss in LOSSES.values()}


def test_dapo_counts_the_tokens_of_the_kept_rows(make_trainer):
    trainer = make_trainer(num_rollouts=12, **{"loss_type": "dapo", **OFTEN, "max_steps": 1})
    rows, build, batches = kept_rows(trainer), trainer._generate_and_score_completions, []
    trainer._generate_and_score_completions = lambda inputs: batches.append(build(inputs)) or batches[-1]
    trainer.train()
    (batch,) = batches
    assert len(rows[0]) == 16
    assert batch["num_items_in_batch"] == sum(map(len, rows[0])) < sum(trainer.rollouts.completion_tokens)


def rloo_advantages(make_trainer, normalize):
    """What TRL's RLOOTrainer gives to a policy's completions: its own sampling, rewards and arithmetic."""

    def config(output, **settings):
        settings.pop("loss_type")
        return RLOOConfig(output, beta=0.0, normalize_advantages=normalize, **settings)

    trainer = make_trainer(RLOOTrainer, config, max_steps=1)
    trainer.train()
    return list(trainer._logs["completion"]), list(trainer._logs["advantages"])


@pytest.mark.parametrize(("scale", "normalize"), [("none", False), ("batch", True)])
@pytest.mark.usefixtures("trl_draws")
def test_leave_one_out_is_rloo_to_the_last_bit(make_trainer, scale, normalize):
    completions, expected = rloo_advantages(make_trainer, normalize)
    config = {"advantage_baseline": "leave_one_out", "scale_rewards": scale}
    trainer = make_trainer(num_rollouts=4, max_steps=1, **config)
    trainer.train()
    assert list(trainer._logs["completion"]) == completions
    assert list(trainer._logs["advantages"]) == expected
    assert len({abs(value) for value in expected}) > 2


@pytest.mark.numeric
@pytest.mark.parametrize("when", ["after", "before"])
def test_leave_one_out_of_the_kept_or_of_all(make_trainer, when):
    trainer = make_trainer(
        num_rollouts=12, advantages=when, advantage_baseline="leave_one_out", scale_rewards="none", max_steps=1
    )
    trainer.train()
    r = trainer.rollouts
    for rewards, kept, got in zip(r.rewards, r.kept, r.advantages, strict=True):
        group = rewards[kept] if when == "after" else rewards
        others = [(group.sum() - rewards[i]) / (len(group) - 1) for i in kept]
        assert_near(got, rewards[kept] - torch.stack(others), FLOAT32)


# -- steps without advantages ---------------------------------------------------------------------------------------


def constant(completions, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize("term", [{"beta": 0.04, "num_iterations": 2}, {"entropy_coef": 0.01}])
def test_a_step_without_advantages_is_not_skipped_where_another_term_has_a_gradient(make_trainer, term):
    config = {"reward": constant, **ONCE, "max_steps": 2, **term}
    trainer = make_trainer(num_rollouts=12, prompt_once=False, **config)
    rows = kept_rows(trainer)
    ours = train(trainer)
    assert [row.get("pods/skipped_step", 0.0) for row in ours[1]] == [0.0, 0.0]
    theirs = train(fed(make_trainer(GRPOTrainer, GRPOConfig, **config), rows))
    assert all(torch.equal(weight, ours[0][name]) for name, weight in theirs[0].items())


def test_a_step_whose_rows_are_all_masked_moves_nothing(make_trainer, random_model):
    config = {"mask_truncated_completions": True, "max_completion_length": 1, "max_steps": 1, "weight_decay": 0.1}
    trainer = make_trainer(num_rollouts=12, reward=lambda completions, **_: list(range(len(completions))), **config)
    trainer.eos_token_ids = []  # no token ends a completion
    trainer.train()
    assert (trainer.rollouts.advantages != 0).any()
    assert trainer.state.log_history[0]["pods/skipped_step"] == 1.0
    for p, q in zip(trainer.model.parameters(), random_model.parameters(), strict=True):
        assert torch.equal(p, q)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"advantages": "sideways"}, "sideways"),
        ({"advantage_baseline": "rloo"}, "rloo"),
        ({"advantage_baseline": "leave_one_out"}, "Set scale_rewards: none"),
        ({"advantage_baseline": "leave_one_out", "scale_rewards": True}, "Set scale_rewards: none"),
        (
            {
                "advantage_baseline": "leave_one_out", "scale_rewards": "none",
                "multi_objective_aggregation": "normalize_then_sum",
            },
            "summed reward",
        ),
        ({"advantages": "before", "multi_objective_aggregation": "normalize_then_sum"}, "summed reward"),
        ({"loss_type": "vespo", "use_vllm": True}, "got vllm_importance_sampling_mode = sequence_mask"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        check_losses(settings)
    with pytest.raises(UserError, match=words):
        PODSConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_type": "cispo"}, "is not set \\(TRL then takes epsilon\\)"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "which = 0.28: a cap below 1"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "unset importance_sampling_level"),
    ],
)
def test_what_trl_trains_with_is_a_warning_and_refused_in_a_recipe_alone(make_trainer, settings, words):
    with pytest.raises(UserError, match=words):
        check_losses(settings)
    with pytest.warns(UserWarning, match=words):
        trainer = make_trainer(**settings, **PLAIN)
    assert_same_run(train(trainer), train(make_trainer(GRPOTrainer, GRPOConfig, **settings)))


@pytest.mark.parametrize(
    "settings",
    [
        *LOSSES.values(),
        {"advantage_baseline": "leave_one_out", "scale_rewards": False},
        {"advantages": "before", "advantage_baseline": "leave_one_out", "scale_rewards": "batch"},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False},
    ],
)
def test_what_makes_sense_passes(settings):
    check_losses(settings)
