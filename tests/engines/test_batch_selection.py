"""`selection: batch` in the trainer: rows of different numbers of each prompt, and what happens to rows without one."""

from unittest.mock import Mock

import pytest
import torch

from pods_rl import BatchSelection, PODSTrainer, advantages, select_batch
from pods_rl.training.run import print_start

from .conftest import assert_equal_weights, batches_of, constant, half_dead

BATCH = {"selection": "batch", "num_rollouts": 8, "max_steps": 2}


def trained(make, trainer_class=PODSTrainer, **config):
    trainer = make(trainer_class, **{**BATCH, **config})
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": "group"},
        pytest.param({"scale_rewards": "none"}, marks=pytest.mark.slow),
        {"scale_rewards": "batch", "advantages": "before"},
    ],
    ids=str,
)
def test_rows_are_those_of_select_batch_with_the_advantages_of_their_prompts(make_trainer, settings):
    trainer = make_trainer(**{**BATCH, "max_steps": 1}, num_prompts=4, **settings)
    batches = batches_of(trainer)
    trainer.train()
    record = trainer.rollouts
    assert record.rewards.shape == (4, 8)
    assert record.kept.equal(select_batch(record.rewards, 8).indices)
    choices = {"when": "advantages", "scale": "scale_rewards"}
    options = {name: settings[key] for name, key in choices.items() if key in settings}
    expected = advantages(record.rewards.float(), BatchSelection(record.kept, 4, 8), **options)
    torch.testing.assert_close(batches[0]["advantages"], expected, rtol=1e-4, atol=1e-6)
    tokenizer = trainer.processing_class
    for row, number in enumerate(record.kept.tolist()):
        for part, text in (("prompt", record.prompts[number]), ("completion", record.completions[number])):
            ids = batches[0][f"{part}_ids"][row][batches[0][f"{part}_mask"][row].bool()]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    columns = record.columns()
    assert sum(columns["selected"]) == 8
    sizes = dict(zip(columns["group"], columns["prompt_rows"], strict=True))
    assert [sizes[group] for group in range(4)] == record.sizes().tolist()
    log = trainer.state.log_history[0]
    assert log["pods/prompts_trained"] == (record.sizes() > 0).sum()
    assert log["pods/rows_a_prompt"] == 8 / log["pods/prompts_trained"]


def test_the_first_line_of_a_run_does_not_say_that_n_equal_to_m_trains_all(make_trainer, tmp_path):
    trainer = make_trainer(selection="batch", num_prompts=4)  # 8 of 4 x 4 rollouts
    shown = Mock()
    prepared = Mock(task=Mock(train=[], notes=()), fitted=None)
    print_start(shown, tmp_path, "mine", trainer, prepared, None)
    assert shown.say.call_args_list[0].args[0].endswith("; 4 rollouts a prompt, some kept by max_variance")


def test_a_dead_prompt_has_no_row_and_rows_without_a_rollout_are_empty(make_trainer):
    trainer = make_trainer(**{**BATCH, "max_steps": 1}, reward=half_dead, per_device_train_batch_size=16, num_prompts=2)
    batches = batches_of(trainer)
    trainer.train()
    (batch,), record = batches, trainer.rollouts
    live = 16 - 8 * sum(prompt in ("37+4=", "60+60=", "8-3+1=", "2+2=") for prompt in record.prompts[::8])
    assert len(record.kept) == live
    assert (batch["advantages"][live:] == 0).all()
    assert batch["completion_mask"][live:].sum() == 0
    assert (batch["completion_mask"][:live].sum(1) > 0).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_empty_rows_change_no_weight(make_trainer, loss):
    trainer = make_trainer(**BATCH, reward=constant, loss_type=loss)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert_equal_weights(trainer, before)
    assert trainer.state.log_history[0]["pods/rows/empty"] == 8


def test_dynamic_sampling_adds_prompts_until_the_rows_are_filled(make_trainer):
    settings = {"reward": half_dead, "per_device_train_batch_size": 16, "num_prompts": 2, "max_steps": 4}
    trainer = trained(make_trainer, dynamic_sampling=True, dynamic_sampling_rounds=8, **settings)
    logs = trainer.state.log_history[:4]
    assert all(row["pods/dynamic_sampling/live_share"] == 1.0 for row in logs)
    assert any(row["pods/dynamic_sampling/prompts_drawn"] > 0 for row in logs)
    assert not any("pods/rows/empty" in row for row in logs)


def test_a_rule_of_a_user_s_over_the_batch_keeps_its_rows(make_trainer):
    def first_two(batch):
        return BatchSelection(torch.tensor([0, 1, 8, 9]), *batch.rewards.shape)

    assert trained(make_trainer, rule=first_two, max_steps=1).rollouts.kept.tolist() == [0, 1, 8, 9]


def test_a_subclass_sees_the_rows_of_its_batch(make_trainer):
    class Columns(PODSTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            texts = self.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
            assert [row["prompt"] for row in inputs] == texts
            return batch

    trained(make_trainer, Columns, num_prompts=4)
