"""When a step counts as bad, apart from whole runs (`tests/reliability/test_loss.py`)."""

from __future__ import annotations

import math

import pytest
import torch

from pods_rl.engines.trl.stability import BadSteps


def test_three_bad_steps_in_a_row_are_enough_and_a_good_one_ends_the_row():
    bad = BadSteps()
    values = [math.nan, math.inf, 0.5, -math.inf, math.nan, math.nan]
    assert [bad.add(step, loss, 1.0) for step, loss in enumerate(values)] == [True, True, False, True, True, True]
    assert bad.exhausted
    assert bad.reason(1e-3).startswith("the loss was not finite in 3 steps in a row (3, 4, 5; last: loss nan, gradient")
    assert "checkpoint-5 holds the last good weights, those of step 2." in bad.reason(1e-3)


@pytest.mark.parametrize(
    ("loss", "norm", "scaled", "left_out", "counts"),
    [
        (0.5, 1.0, False, False, (0.0, 0.0)),
        (0.5, math.inf, False, True, (0.0, 1.0)),
        (0.5, None, False, False, (0.0, 0.0)),  # DeepSpeed may know none
        (0.5, math.inf, True, False, (0.0, 1.0)),  # how the scaler of fp16 finds its scale: it skips by itself
        (math.nan, math.nan, True, True, (1.0, 1.0)),
    ],
)
def test_what_is_left_out_and_counted(make_trainer, monkeypatch, loss, norm, scaled, left_out, counts):
    trainer = make_trainer()
    trainer.model_wrapped = trainer.model
    monkeypatch.setattr(trainer.accelerator, "scaler", object() if scaled else None)
    parameter = next(trainer.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    trainer._stability.step_loss = torch.tensor(loss)
    trainer._stability.gradient_norm = None if norm is None else torch.tensor(norm)
    assert trainer._stability.skip_bad_step() == left_out
    assert (parameter.grad is None) == left_out
    metrics = trainer._metrics["train"]
    assert (metrics["pods/bad_loss"], metrics["pods/bad_gradient"]) == tuple([count] for count in counts)
    assert len(trainer._stability.bad_steps.row) == left_out
