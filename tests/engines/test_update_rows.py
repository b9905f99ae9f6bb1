"""The update without repeats and without rows that cannot teach: TRL's gradient in float64, by the real trainer."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from trl.trainer import utils

from pods_rl import PODSTrainer
from pods_rl.engines.trl import passes

from .conftest import PROMPTS, letter_reward
from .test_losses import LOSSES, OFTEN, OTHERS

REPEATS = ("prompt_once_update", "merge_equal_rows")
OFF = dict.fromkeys((*REPEATS, "skip_zero_advantage_rows", "trim_padding", "sort_by_length"), False)


class ExactHead:
    """TRL's head in the model's own precision; TRL's computes in float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return logps.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy, None, None, None


def exact_norm(norm, x):
    """Qwen2's norm in the model's own precision; transformers computes it in float32."""
    return norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(passes, "CALL", -99)  # packs of single rows too
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactHead)
    monkeypatch.setattr(Qwen2RMSNorm, "forward", exact_norm)


def half_dead(prompts, completions, **_):
    """Constant for every second prompt."""
    letters = letter_reward(completions)
    return [0.3 if PROMPTS.index(p) % 2 else reward for p, reward in zip(prompts, letters, strict=True)]


class Gradients(TrainerCallback):
    """The gradient of each step, as the optimizer gets it."""

    def __init__(self, trainer):
        self.trainer, self.steps = trainer, []

    def on_pre_optimizer_step(self, *args, **kwargs):
        named = self.trainer.model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def run(make_trainer, prepare=lambda trainer: None, **config):
    """Gradients of each step, and logs. The weights do not move, so that steps do not add up their rounding."""
    settings = {
        "num_rollouts": 8,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "learning_rate": 0.0,
        "max_steps": 2,
        "shuffle_dataset": False,
    }
    trainer = make_trainer(dtype=torch.float64, **settings | config)
    prepare(trainer)
    watch = Gradients(trainer)
    trainer.add_callback(watch)
    trainer.train()
    return watch.steps, [row for row in trainer.state.log_history if "loss" in row]


def assert_same(ours, theirs, tolerance):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        largest = max([1e-30, *(gradient.abs().max().item() for gradient in other.values())])
        apart = {name: (one[name] - gradient).abs().max().item() / largest for name, gradient in other.items()}
        assert max(apart.values(), default=0.0) <= tolerance, max(apart, key=apart.__getitem__)


# -- each prompt once ----------------------------------------------------------------------------------------------


def checkpointing(reentrant):
    def prepare(trainer):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": reentrant}
        trainer.model.enable_input_require_grads()

    return prepare


LORA = {
    "trainer_arguments": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
}
SETTINGS = {
    **{name: {**settings, **OFTEN} for name, settings in (LOSSES | OTHERS).items()},
    "LoRA, KL": {**LORA, "beta": 0.04, **OFTEN},
    "one micro-batch": {"per_device_train_batch_size": 16},
    "checkpointing": {"prepare": checkpointing(False)},
    "reentrant checkpointing": {"prepare": checkpointing(True)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_packs_leave_the_gradient(make_trainer, name):
    config = {"per_device_train_batch_size": 8, **SETTINGS[name], "max_steps": 2}
    if "num_iterations" in config:
        config["learning_rate"] = 0.05  # ratios leave 1 in the second step
    ours, logs = run(make_trainer, **{"skip_zero_advantage_rows": False, **config})
    theirs, expected = run(make_trainer, **OFF, **config)
    assert_same(ours, theirs, 1e-12)
    assert any(theirs)  # DAPO's first step has no gradient: every completion is truncated
    for row, other in zip(logs, expected, strict=True):
        assert row.keys() == other.keys()
        if "entropy" in row:
            assert row["entropy"] == pytest.approx(other["entropy"], rel=1e-3)  # TRL's is a mean over micro-batches
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)


def test_the_model_sees_each_prompt_once_and_no_padding(make_trainer):
    seen = []

    def watch(trainer):
        note = lambda module, given, named: seen.append(named) if module.training else None  # noqa: E731
        trainer.model.register_forward_pre_hook(note, with_kwargs=True)

    trainer = make_trainer(num_rollouts=8, max_steps=1, merge_equal_rows=False, skip_zero_advantage_rows=False)
    trainer._takes = trainer._update._takes_packs(trainer.model)
    watch(trainer)
    trainer.train()
    (update,) = [named for named in seen if "shift_labels" in named]
    record = trainer.rollouts
    prompts = [len(trainer.processing_class(p)["input_ids"]) for p in dict.fromkeys(record.prompts)]
    kept = [record.completion_tokens[8 * p + i] for p, group in enumerate(record.kept.tolist()) for i in group]
    assert update["input_ids"].shape == (1, sum(prompts) - len(prompts) + sum(kept))


def test_a_model_with_dropout_trains_on_rows_and_says_so_once(make_trainer, caplog):
    adapter = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    with caplog.at_level(logging.INFO, logger="pods_rl"):
        trainer = make_trainer(
            num_rollouts=8, max_steps=2, trainer_arguments={"peft_config": adapter}, disable_dropout=False
        )
        trainer.train()
    said = [record.getMessage() for record in caplog.records if "prompt_once_update" in record.getMessage()]
    assert said == ["prompt_once_update does not apply to PeftModel: it has dropout"]


# -- rows that cannot teach ----------------------------------------------------------------------------------------

DROPPING = {
    **{name: {**settings, **OFTEN} for name, settings in LOSSES.items()},
    "n = m": {"num_rollouts": 4, "per_device_train_batch_size": 16},
    "two micro-batches": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "eight micro-batches": {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2},
}


@pytest.mark.parametrize("name", DROPPING)
def test_left_out_rows_leave_the_gradient(make_trainer, name):
    """Rows one by one, so that nothing else rounds: the largest difference is that of a sum in another order."""
    config = {"reward": half_dead, **OFF, **DROPPING[name], "max_steps": 2}
    if "num_iterations" in config:
        config["learning_rate"] = 0.05  # ratios leave 1 and are clipped in the second step
    theirs, expected = run(make_trainer, skip_zero_advantage_steps=False, **config)
    ours, logs = run(make_trainer, skip_zero_advantage_steps=False, **config | {"skip_zero_advantage_rows": True})
    assert sum(row["pods/rows/left_out"] for row in logs) > 0
    assert_same(ours, theirs, 1e-12)
    for row, other in zip(logs, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert row["pods/tokens/trained"] == other["pods/tokens/trained"]
        assert {k: row[k] for k in row if "clip_ratio" in k and "mean" in k} == pytest.approx(
            {k: other[k] for k in other if "clip_ratio" in k and "mean" in k}
        )


def test_all_levers_together_leave_the_gradient(make_trainer):
    config = {
        "reward": half_dead,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
        "num_rollouts": 4,
    }
    ours, logs = run(make_trainer, **config)
    theirs, _ = run(make_trainer, **config, **OFF)
    assert_same(ours, theirs, 1e-12)
    assert all(row["pods/rows/left_out"] >= 8 for row in logs)


def test_entropy_is_that_of_the_rows_computed(make_trainer):
    """By hand, from TRL's own pass over every row: a generation is one micro-batch."""
    config = {"reward": half_dead, "per_device_train_batch_size": 16, "max_steps": 1}
    entropies, batches = [], []

    def watch(trainer):
        scores, loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: entropies.append(scores(*a, **k)) or entropies[-1]
        trainer._compute_loss = lambda model, inputs: batches.append(inputs) or loss(model, inputs)

    run(make_trainer, watch, **config, **OFF)
    ((_, entropy, _),), (batch,) = entropies, batches
    live = batch["completion_mask"] * (batch["advantages"] != 0).unsqueeze(1)
    assert live.any(dim=1).sum() <= 8
    expected = (entropy * live).sum() / live.sum()
    everything = (entropy * batch["completion_mask"]).sum() / batch["completion_mask"].sum()
    _, (row,) = run(make_trainer, **config)
    assert row["entropy"] == pytest.approx(expected.item(), rel=1e-6) != pytest.approx(everything.item(), rel=1e-6)


@pytest.mark.parametrize("term", [{"beta": 0.04}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}])
def test_no_row_is_left_out_where_another_term_reads_it(make_trainer, term):
    config = {"reward": half_dead, "per_device_train_batch_size": 16, "num_rollouts": 4, **term}
    ours, logs = run(make_trainer, **config)
    theirs, _ = run(make_trainer, **config, **OFF)
    assert_same(ours, theirs, 1e-12)
    assert [row["pods/rows/left_out"] for row in logs] == [0, 0]


def test_a_subclass_with_its_own_loss_gets_every_row(make_trainer):
    class Regularized(PODSTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    trainer = make_trainer(Regularized, reward=half_dead, num_rollouts=4)
    trainer.train()
    assert [row["pods/rows/left_out"] for row in trainer.state.log_history if "loss" in row] == [0, 0]


def test_equal_rows_are_computed_once_and_counted(make_trainer):
    """One completion for all rollouts of a prompt but one, whose reward differs."""
    shapes = []

    def same(trainer):
        ids = trainer.processing_class("7+7")["input_ids"]
        trainer._generate_single_turn = lambda prompts, *_, **__: (
            [ids if i % 4 else ids[:2] for i in range(len(prompts))],
            None,
        )
        trainer.model.register_forward_pre_hook(
            lambda module, given, named: shapes.append(named["input_ids"].shape), with_kwargs=True
        )

    def shorter(completions, **_):
        return [float(len(text)) for text in completions]

    config = {"reward": shorter, "num_rollouts": 4, "per_device_train_batch_size": 8, "max_steps": 1}
    theirs, _ = run(make_trainer, same, **config, **OFF)
    ours, (row,) = run(make_trainer, same, **config, **OFF | {"merge_equal_rows": True})
    assert [shape[0] for shape in shapes] == [8, 4]
    assert (row["pods/rows/merged"], row["pods/rows/left_out"]) == (4, 0)
    assert_same(ours, theirs, 1e-12)


def test_micro_batches_without_a_live_row_come_first_and_have_no_pass(make_trainer):
    """Two of four: their rows are counted as trained, and in the shares of clipping."""
    calls = []
    config = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "num_rollouts": 4, "max_steps": 1}

    shares = []

    class Shares(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_step_end(self, *args, **kwargs):
            shares.append(len(self.trainer._metrics["train"]["clip_ratio/region_mean"]))

    def watch(trainer):
        loss = trainer._compute_loss
        trainer._compute_loss = lambda *args: calls.append(1) or loss(*args)
        trainer.add_callback(Shares(trainer))

    run(make_trainer, watch, reward=half_dead, **config)
    assert len(calls) == 2
    assert shares == [4]  # TRL's mean is one over micro-batches
    run(make_trainer, watch, reward=half_dead, **config, **OFF)
    assert len(calls) == 2 + 4
