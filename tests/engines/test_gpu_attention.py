"""What the update computes, and what it says of it: on a stand-in for a GPU, with experts, and without trees."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pods_rl import PODSConfig, PODSTrainer
from tests.numeric import assert_near
from tests.prefix_tree.gpu import TORCHES, put_gpu

from .conftest import Gradients, around, letter_reward, update_of

LOGGER = "pods_rl.engines.trl.step.update"


def train(trainer):
    """Train; return the gradients of each step and the logs."""
    watch = Gradients(trainer)
    trainer.train()
    return watch.steps, [row for row in trainer.state.log_history if "loss" in row]


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.numeric
@pytest.mark.usefixtures("trl_draws")
@pytest.mark.parametrize(
    ("version", "dtype"), [("2.9", torch.float32), (TORCHES[-1], torch.float32), (TORCHES[-1], torch.bfloat16)]
)
def test_a_run_on_a_gpu_trains_on_trees(monkeypatch, make_trainer, caplog, version, dtype):
    """Complete steps. Under autocast the model is probed under autocast, else it would be probed with other kernels."""
    put_gpu(monkeypatch, version)
    settings = {"dtype": dtype, "bf16": True, "num_rollouts": 8, "max_grad_norm": 0.0, "learning_rate": 0.0}
    trainer = make_trainer(**settings)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        ours, logs = train(trainer)
    kernel = "scaled_dot_product_attention over blocks" if version == "2.9" else "torch.nn.attention.varlen"
    assert kernel in update_of(trainer).attention
    (message,) = messages(caplog)
    assert kernel in message
    theirs, rows_logs = train(make_trainer(**settings, prefix_tree=False))
    for tree, rows in zip(ours, theirs, strict=True):
        tree_gradient = torch.cat([tree[name].flatten().float() for name in sorted(rows)])
        rows_gradient = torch.cat([rows[name].flatten().float() for name in sorted(rows)])
        assert_near(tree_gradient, rows_gradient, 0.05)  # rounding of bfloat16 over all layers
    for row, rows_row in zip(logs, rows_logs, strict=True):
        assert 0 < row["pods/tokens/computed"] < rows_row["pods/tokens/computed"]


def experts(tokenizer):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager",
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def count_rows(trainer):
    """Count the tokens of the rows that TRL computes in losses, without the last token of each row."""
    counted = []

    @around(trainer, "_get_per_token_logps_and_entropies")
    def counting(compute, model, ids, *args, **kwargs):
        if update_of(trainer)._batch:
            counted.append(ids.size(0) * (ids.size(1) - 1))
        return compute(model, ids, *args, **kwargs)

    return counted


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        ({}, "prefix trees, with attention by scaled_dot_product_attention over blocks"),
        ({"prefix_tree": False}, "rows: prefix_tree is false"),
        ({"router_aux_loss_coef": 0.0}, "prefix trees, with attention by scaled_dot_product_attention over blocks"),
    ],
    ids=["auxiliary loss", "no trees", "no auxiliary loss"],
)
def test_experts_say_why_rows_are_computed_and_every_pass_counts(
    tmp_path, tokenizer, dataset, caplog, settings, attention
):
    config = PODSConfig(
        str(tmp_path), num_generations=4, num_rollouts=8, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_completion_length=8, max_steps=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    trainer = PODSTrainer(
        model=experts(tokenizer), reward_funcs=letter_reward, args=config, train_dataset=dataset,
        processing_class=tokenizer,
    )  # fmt: skip
    counted = count_rows(trainer)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        _, logs = train(trainer)
    assert update_of(trainer).attention.startswith(attention)
    if "prefix_tree" in settings:
        assert messages(caplog) == []
    else:
        assert ["as prefix trees" in message for message in messages(caplog)] == [True]
    computed = sum(row["pods/tokens/computed"] for row in logs)
    if "prefix_tree" in settings:
        assert computed == sum(counted) > 0
    else:
        assert 0 < computed < sum(counted)
