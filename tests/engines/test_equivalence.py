"""The same update by another way: TRL's trainer, an accumulated batch, the reference objective."""

from __future__ import annotations

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from pods_rl import pods_objective
from pods_rl.selection import RULES
from tests.numeric import FLOAT32, assert_near

pytestmark = pytest.mark.numeric
PLAIN = {"exact_trl": True}


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def gradients_of_first_step(trainer):
    """Gradients as the optimizer sees them, before it moves anything."""
    seen = {}

    class Spy(type(trainer.callback_handler.callbacks[0]).__mro__[1]):
        def on_pre_optimizer_step(self, *args, **kwargs):
            if not seen:
                seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.add_callback(Spy())
    trainer.train()
    return seen


@pytest.mark.parametrize("rule", sorted(RULES))
def test_n_equal_to_m_is_trl_to_the_last_bit(make_trainer, rule):
    theirs = make_trainer(GRPOTrainer, GRPOConfig, max_steps=5)
    theirs.train()
    ours = make_trainer(max_steps=5, num_rollouts=4, rule=rule, **PLAIN)
    ours.train()
    for name, weight in weights(theirs).items():
        assert torch.equal(weight, weights(ours)[name]), name


def test_one_batch_equals_its_accumulation(make_trainer):
    config = {"num_rollouts": 8, "max_steps": 1}
    expected = gradients_of_first_step(make_trainer(**config, per_device_train_batch_size=8))
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    got = gradients_of_first_step(make_trainer(**config, **split))
    assert expected
    assert_near(got, expected, FLOAT32)


@pytest.mark.parametrize("order", ["after", "before"])
def test_a_trained_step_is_the_reference_objective(make_trainer, order):
    """A policy in float64, of which TRL computes the log-probabilities in float32."""
    trainer = make_trainer(
        num_rollouts=8,
        advantages=order,
        max_steps=1,
        dtype=torch.float64,
        max_grad_norm=0.0,
        learning_rate=0.0,
    )
    batches = []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **kw: (
        batches.append(inputs),
        compute_loss(model, inputs, **kw),
    )[1]
    got = gradients_of_first_step(trainer)
    (batch,) = batches
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    T = batch["completion_ids"].size(1)
    model = trainer.model
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1]
    logps = logits.double().log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    rows = (1, *logps.shape)  # one flat group: the objective is a mean over all rows
    pods_objective(
        logps.view(rows),
        logps.detach().view(rows),
        batch["advantages"].double().view(1, -1),
        batch["completion_mask"].view(rows),
    ).backward()
    assert_near(got, {name: parameter.grad for name, parameter in model.named_parameters()}, FLOAT32)
