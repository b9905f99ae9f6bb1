"""What the update computes on a stand-in for a GPU, and what it says of it."""

import logging

import pytest
import torch

from tests.numeric import assert_near
from tests.prefix_tree.gpu import TORCHES, put_gpu

from .conftest import Gradients, update_of

LOGGER = "pods_rl.engines.trl.step.update"


def train(trainer):
    """Train; return the gradients of each step and the logs."""
    watch = Gradients(trainer)
    trainer.train()
    return watch.steps, [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.numeric
@pytest.mark.usefixtures("trl_draws")
def test_a_run_on_a_gpu_trains_on_trees(monkeypatch, make_trainer, caplog):
    """Complete steps. Under autocast the model is probed under autocast, else it would be probed with other kernels."""
    put_gpu(monkeypatch, TORCHES[-1])
    settings = {"bf16": True, "num_rollouts": 8, "max_grad_norm": 0.0, "learning_rate": 0.0}
    trainer = make_trainer(**settings)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        ours, logs = train(trainer)
    assert "torch.nn.attention.varlen" in update_of(trainer).attention
    (message,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert "torch.nn.attention.varlen" in message
    theirs, rows_logs = train(make_trainer(**settings, prefix_tree=False))
    for tree, rows in zip(ours, theirs, strict=True):
        tree_gradient = torch.cat([tree[name].flatten().float() for name in sorted(rows)])
        rows_gradient = torch.cat([rows[name].flatten().float() for name in sorted(rows)])
        assert_near(tree_gradient, rows_gradient, 0.05)  # rounding of bfloat16 over all layers
    for row, rows_row in zip(logs, rows_logs, strict=True):
        assert 0 < row["pods/tokens/computed"] < rows_row["pods/tokens/computed"]
