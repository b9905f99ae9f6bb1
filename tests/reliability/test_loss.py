"""A loss or a gradient that is not finite moves nothing, is said as it was, and three in a row end the run well."""

import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from pods_rl.engines.trl import PODSTrainer, UnstableTrainingError


class OddLoss(PODSTrainer):
    """Adds a constant to the loss of some steps: the gradient stays as it is."""

    odd: dict[int, float] = {}  # noqa: RUF012

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) + self.odd.get(self.state.global_step + 1, 0.0)


class Snapshots(TrainerCallback):
    """Weights and optimizer before and after each step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.before, self.after = {}, {}

    def state(self):
        weights = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
        optimizer = self.trainer.optimizer.state_dict()["state"]
        return weights, {(i, k): torch.as_tensor(v).clone() for i, s in optimizer.items() for k, v in s.items()}

    def on_step_begin(self, args, state, control, **kwargs):
        self.before[state.global_step + 1] = self.state()

    def on_step_end(self, args, state, control, **kwargs):
        self.after[state.global_step] = self.state()


def same(one, other):
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def spoiled(make_trainer, fault, steps, **config):
    """A trainer whose loss or gradient is not finite in these steps, and its snapshots."""
    value, what = fault.split()
    trainer = make_trainer(OddLoss, num_rollouts=8, lr_scheduler_type="constant", weight_decay=0.1, **config)
    if what == "loss":
        trainer.odd = dict.fromkeys(steps, float(value))
    else:
        parameter = next(trainer.model.parameters())
        parameter.register_hook(lambda g: g * float(value) if trainer.state.global_step + 1 in steps else g)
    snapshots = Snapshots(trainer)
    trainer.add_callback(snapshots)
    return trainer, snapshots


def logged(trainer):
    return {line["step"]: line for line in trainer.state.log_history if "loss" in line}


@pytest.mark.parametrize(
    ("fault", "config"),
    [
        ("nan loss", {}),
        ("inf loss", {"max_grad_norm": 0.0, "logging_nan_inf_filter": False}),
        ("nan gradient", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
        ("inf gradient", {"max_grad_norm": 0.0}),
    ],
)
def test_a_bad_step_moves_nothing_and_is_said_as_it_was(make_trainer, fault, config):
    trainer, snapshots = spoiled(make_trainer, fault, {2}, max_steps=4, **config)
    trainer.train()
    value, what = fault.split()
    moved = [step for step in range(1, 5) if not same(snapshots.before[step], snapshots.after[step])]
    assert moved == [1, 3, 4]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    lines = logged(trainer)
    shown = lines[2]["loss" if what == "loss" else "grad_norm"]
    assert math.isnan(shown) if value == "nan" else not math.isfinite(shown)
    assert [lines[step].get(f"pods/bad_{what}", 0.0) for step in range(1, 5)] == [0.0, 1.0, 0.0, 0.0]
    assert all(math.isfinite(lines[step]["loss"]) for step in (1, 3, 4))


def test_three_in_a_row_end_the_run_with_the_last_good_weights(make_trainer, tmp_path, caplog):
    trainer, snapshots = spoiled(make_trainer, "nan loss", {3, 4, 5}, max_steps=8)
    with caplog.at_level(logging.WARNING), pytest.raises(UnstableTrainingError, match=r"loss .*\(3, 4, 5"):
        trainer.train()
    assert trainer.state.global_step == 5
    assert [record.message[:7] for record in caplog.records if "pods_rl" in record.name] == ["step 3:"]
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-5"
    saved = type(trainer.model).from_pretrained(checkpoint)
    assert same([snapshots.after[2][0]], [dict(saved.named_parameters())])
    again = make_trainer(num_rollouts=8, max_steps=6)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert "pods/bad_loss" not in logged(again)[6]


def test_a_good_step_in_between_goes_on(make_trainer):
    trainer, _ = spoiled(make_trainer, "nan loss", {1, 2, 4, 5}, max_steps=5)
    trainer.train()
    assert [line.get("pods/bad_loss", 0.0) for line in logged(trainer).values()] == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_ruined_policy_says_so_where_it_cannot_generate(make_trainer):
    trainer = make_trainer(num_rollouts=8, max_steps=3, learning_rate=1e30, max_grad_norm=0.0)
    with pytest.raises(UnstableTrainingError, match=r"step 1 .*learning_rate"):
        trainer.train()
