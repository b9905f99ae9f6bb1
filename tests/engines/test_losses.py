"""The same update by another way: TRL's trainer, an accumulated batch, the reference objective.

n = m is TRL to the last bit, and m of n is TRL fed exactly the m kept rows: whatever divides by a number of rows,
groups or tokens must count those m alone.
"""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from pods_rl import pods_objective
from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields
from tests.numeric import FLOAT32, assert_near

from .conftest import Gradients, around, assert_equal_weights, batches_of, constant, half_dead, kept_of, weights

PLAIN = {"exact_trl": True}
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
# Accumulated, several steps and passes over a generation, so that ratios leave 1.
OFTEN = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_iterations": 2,
    "max_steps": 3,
}  # fmt: skip


def kept_rows(trainer):
    """Filled as it trains: of each generation the trained completions and the sampler's log-probabilities of them."""
    rows = []

    @around(trainer, "_generate")
    def record(generate, *given):
        trained = generate(*given)
        rows.append(([list(ids) for ids in trained[1]], trained[4]))
        torch.manual_seed(len(rows))  # TRL shuffles the rows next, and sampling has drawn from the same generator
        return trained

    return rows


def fed(trainer, rows):
    """A trainer whose sampler returns these rows, generation by generation."""
    given = enumerate(rows, start=1)

    @around(trainer, "_generate_single_turn")
    def sample(generate, *args, **kwargs):
        number, generated = next(given)
        torch.manual_seed(number)
        return generated

    return trainer


def train(trainer):
    """Weights and logs of a run."""
    trainer.train()
    return weights(trainer), [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    "loss",
    [
        "DAPO",
        "KL",
        "the most uncertain tokens",
        *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("grpo", "Dr. GRPO", "CISPO")),
    ],
)
def test_m_of_n_is_trl_on_those_m(make_trainer, loss):
    config = (LOSSES | OTHERS)[loss] | OFTEN
    trainer = make_trainer(num_rollouts=12, **PLAIN, **config)
    rows, batches = kept_rows(trainer), batches_of(trainer)
    our_weights, our_logs = train(trainer)
    their_weights, their_logs = train(fed(make_trainer(GRPOTrainer, GRPOConfig, **config), rows))
    assert_equal_weights(our_weights, their_weights)
    for our_row, their_row in zip(our_logs, their_logs, strict=True):
        assert their_row["grad_norm"] > 0
        for name in ("loss", "grad_norm", "kl", "entropy", *(key for key in their_row if "clip" in key)):
            if name in their_row and not name.startswith("completions/"):
                assert our_row[name] == their_row[name], name
    assert all(len(ids) == 16 for ids, _ in rows)
    if loss == "the most uncertain tokens":  # DAPO without masks: it counts the tokens of the kept rows
        counts = [sum(map(len, ids)) for ids, _ in rows]
        assert [batch["num_items_in_batch"] for batch in batches] == counts
        assert counts[-1] < sum(trainer.rollouts.completion_tokens)


def test_every_loss_that_a_recipe_may_name_is_in_the_table():
    assert set(fields()["loss_type"].choices) == {loss["loss_type"] for loss in LOSSES.values()}


@pytest.mark.numeric
def test_one_batch_equals_its_accumulation(make_trainer):
    found = []
    for split in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        trainer = make_trainer(num_rollouts=8, max_steps=1, **split)
        watch = Gradients(trainer)
        trainer.train()
        found.append(watch.steps[0])
    assert found[0]
    assert_near(found[1], found[0], FLOAT32)


def log_probs(model, batch):
    """Log-probabilities of the completions of a batch, `[B, T]`, each row alone with its padding."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    T = batch["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


@pytest.mark.numeric
@pytest.mark.parametrize("order", ["after", "before"])
def test_a_trained_step_has_the_gradient_of_the_reference_objective(make_trainer, order):
    """A policy in float64, of which TRL computes the log-probabilities in float32."""
    settings = {"max_steps": 1, "dtype": torch.float64, "max_grad_norm": 0.0, "learning_rate": 0.0}
    trainer = make_trainer(num_rollouts=8, advantages=order, **settings)
    watch, batches, compute_loss = Gradients(trainer), [], trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **kw: (batches.append(inputs), compute_loss(model, inputs, **kw))[1]
    trainer.train()
    (batch,), model = batches, trainer.model
    model.zero_grad()
    logps = log_probs(model, batch)
    rows = (1, *logps.shape)  # one flat group: the objective is a mean over all rows
    pods_objective(
        logps.view(rows),
        logps.detach().view(rows),
        batch["advantages"].double().view(1, -1),
        batch["completion_mask"].view(rows),
    ).backward()
    assert_near(watch.steps[0], {name: parameter.grad for name, parameter in model.named_parameters()}, FLOAT32)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("loss", "accumulated", "prefix_tree"),
    [
        ("grpo", 1, True),
        ("grpo", 4, True),
        ("dr_grpo", 4, True),
        ("luspo", 4, False),
        ("dapo", 4, True),
        ("dapo", 4, False),
    ],
)
def test_masked_constant_groups_count_in_no_denominator(make_trainer, loss, accumulated, prefix_tree):
    """The mean over the rows or tokens of live groups, by hand in float64. A first step has ratios of 1."""
    settings = {"max_steps": 1, "dtype": torch.float64, "max_grad_norm": 0.0, "learning_rate": 0.0, "loss_type": loss}
    trainer = make_trainer(
        reward=half_dead, num_rollouts=8, mask_constant_groups=True, prefix_tree=prefix_tree,
        per_device_train_batch_size=16 // accumulated, gradient_accumulation_steps=accumulated, **settings,
    )  # fmt: skip
    watch, batches = Gradients(trainer), batches_of(trainer)
    trainer.train()
    (batch,), model = batches, trainer.model
    live = (batch["advantages"].view(-1, 4) != 0).any(1).repeat_interleave(4)
    assert 0 < live.sum() < len(live)
    assert not batch["completion_mask"][~live].any()
    tokens = batch["completion_mask"][live].double()
    model.zero_grad()
    logps = log_probs(model, batch)[live]
    row_losses = -(logps * tokens).sum(1) * batch["advantages"][live].double()
    rows = len(tokens)
    lengths = tokens.sum(1)
    expected = {
        "grpo": (row_losses / lengths).sum() / rows,
        "dr_grpo": row_losses.sum() / (rows * trainer.max_completion_length),
        "luspo": row_losses.sum() / rows,
        "dapo": row_losses.sum() / lengths.sum(),
    }
    expected[loss].backward()
    assert_near(watch.steps[0], {name: parameter.grad for name, parameter in model.named_parameters()}, FLOAT32)


def test_an_entropy_bonus_cannot_be_divided_by_the_groups_that_are_not_masked(make_trainer):
    with pytest.raises(UserError, match="entropy_coef"):
        make_trainer(mask_constant_groups=True, entropy_coef=0.01)


# -- steps without advantages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", [{"beta": 0.04, "num_iterations": 2}, {"entropy_coef": 0.01}])
def test_a_step_without_advantages_is_not_skipped_where_another_term_has_a_gradient(make_trainer, term):
    config = {"reward": constant, "per_device_train_batch_size": 8, "max_steps": 2, **term}
    trainer = make_trainer(num_rollouts=12, prefix_tree=False, **config)
    rows = kept_rows(trainer)
    ours = train(trainer)
    assert [row.get("pods/skipped_step", 0.0) for row in ours[1]] == [0.0, 0.0]
    assert_equal_weights(ours[0], train(fed(make_trainer(GRPOTrainer, GRPOConfig, **config), rows))[0])


def test_a_step_whose_rows_are_all_masked_moves_nothing(make_trainer, random_model):
    config = {"mask_truncated_completions": True, "max_completion_length": 1, "max_steps": 1, "weight_decay": 0.1}
    trainer = make_trainer(num_rollouts=12, reward=lambda completions, **_: list(range(len(completions))), **config)
    trainer.eos_token_ids = []  # no token ends a completion
    trainer.train()
    assert (trainer.rollouts.rewards.diff(dim=1) > 0).all()  # recorded, although no rollout is scored for selection
    assert kept_of(trainer.rollouts).tolist() == [[0, 1, 2, 3]] * 2
    assert (trainer.rollouts.advantages == 0).all()
    assert trainer.state.log_history[0]["pods/masked_rollouts"] == 24.0
    assert trainer.state.log_history[0]["pods/skipped_step"] == 1.0
    assert_equal_weights(trainer, random_model)
