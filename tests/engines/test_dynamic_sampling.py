"""Dynamic sampling: groups whose rewards are all equal are replaced by groups of new prompts."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from trl import GRPOTrainer

from pods_rl.errors import UserError

from .conftest import PROMPTS, around, batches_of, constant, letter_reward

DEAD = PROMPTS[::2]
SETTINGS = {"num_rollouts": 8, "dynamic_sampling": True, "per_device_train_batch_size": 16, "max_steps": 1}


def dead_for_half(prompts, completions, **_):
    """Constant for every second prompt of the data set."""
    letters = letter_reward(completions)
    return [0.5 if prompt in DEAD else score for prompt, score in zip(prompts, letters, strict=True)]


def answer(prompts, completions, **_):
    """1 for the even rollouts of a prompt that is not dead."""
    return [float(i % 2 and prompt not in DEAD) for i, prompt in enumerate(prompts)]


def trained_groups(record):
    """The group of each prompt's rows, in their order."""
    return (record.kept // record.rewards.size(1)).unique_consecutive().tolist()


def of_rollouts(record, values):
    """Values by rollout as `[G, N]`; one process has them all."""
    return [values[record.numbers.index(i)] for i in range(len(values))]


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_every_trained_group_is_live_and_has_its_own_advantages(make_trainer, scale):
    trainer = make_trainer(reward=dead_for_half, dynamic_sampling_rounds=8, scale_rewards=scale, **SETTINGS)
    trainer.train()
    found, log = trainer.rollouts, trainer.state.log_history[0]
    prompts = of_rollouts(found, found.prompts)
    assert log["pods/dynamic_sampling/live_share"] == 1.0
    assert log["pods/dynamic_sampling/prompts_drawn"] == len(found.rewards) - 4 > 0
    assert not {prompts[8 * group] for group in trained_groups(found)} & set(DEAD)
    kept = found.kept_rewards().float()
    centred = kept - kept.mean(dim=1, keepdim=True)
    deviation = kept.std(dim=1, keepdim=True) if scale == "group" else kept.std()
    torch.testing.assert_close(found.advantages, (centred / (deviation + 1e-4)).flatten(), rtol=1e-4, atol=1e-6)
    everything = torch.tensor(of_rollouts(found, dead_for_half(found.prompts, found.completions)))
    assert log["reward"] == pytest.approx(everything.mean().item(), abs=1e-6)


def test_the_rows_of_a_joined_batch_are_those_of_its_groups(make_trainer):
    trainer = make_trainer(reward=dead_for_half, beta=0.1, **SETTINGS)
    batches = batches_of(trainer)
    trainer.train()
    (batch,), found, tokenizer = batches, trainer.rollouts, trainer.processing_class
    prompts, completions = of_rollouts(found, found.prompts), of_rollouts(found, found.completions)
    for row, number in enumerate(found.kept.tolist()):
        for part, text in (("prompt", prompts[number]), ("completion", completions[number])):
            ids = batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    mask = batch["completion_mask"]
    assert batch["num_items_in_batch"] == mask.sum()
    assert (batch["ref_per_token_logps"][mask.bool()] < 0).all()


def test_groups_stay_dead_after_the_last_round(make_trainer):
    settings = {"num_rollouts": 8, "dynamic_sampling": True, "dynamic_sampling_rounds": 2, "max_steps": 1}
    trainer = make_trainer(reward=constant, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["pods/dynamic_sampling/prompts_drawn"] == 4
    assert log["pods/dynamic_sampling/live_share"] == 0
    assert len(trainer.rollouts.rewards) == 6
    assert trained_groups(trainer.rollouts) == [0, 1]


LONG = ["1+2=", "37+40+12+12+1=", "5-1=", "60+60+33=", "9+9+9=", "8-3+1=", "77-1=", "2+2="]


def dead_if_long(prompts, completions, **_):
    """Constant for every second prompt, among them the longest: the other rounds have another padding."""
    letters = letter_reward(completions)
    return [0.5 if LONG.index(prompt) % 2 else score for prompt, score in zip(prompts, letters, strict=True)]


def absolute_positions(tokenizer, folder):
    """A random GPT-2, whose log-probabilities depend on the padding on the left."""
    set_seed(7)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none, **ends, pad_token_id=tokenizer.pad_token_id))
    with torch.no_grad():
        model.transformer.wpe.weight.normal_(0, 1)
        model.transformer.wte.weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    return GPT2LMHeadModel.from_pretrained(folder)


@pytest.mark.parametrize("prefix_tree", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_joined_batch_has_the_log_probabilities_of_its_own_padding(make_trainer, tokenizer, tmp_path, prefix_tree):
    model = absolute_positions(tokenizer, tmp_path / "gpt2")
    data = Dataset.from_dict({"prompt": LONG * 4})
    settings = SETTINGS | {"num_iterations": 2, "beta": 0.1, "prefix_tree": prefix_tree, "dynamic_sampling_rounds": 8}
    trainer = make_trainer(reward=dead_if_long, train_dataset=data, model=model, **settings)
    checked = []

    @around(trainer, "_generate_and_score_completions")
    def built(build, inputs):
        batch = build(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        real = batch["completion_mask"].bool()
        for name, which in (("old_per_token_logps", trainer.model), ("ref_per_token_logps", trainer.ref_model)):
            with torch.no_grad():
                expected, *_ = GRPOTrainer._get_per_token_logps_and_entropies(
                    trainer, which, ids, mask, real.size(1), batch_size=16
                )
            checked.append((batch[name] - expected)[real].abs().max().item())
        return batch

    trainer.train()
    log = trainer.state.log_history[0]
    assert log["pods/dynamic_sampling/prompts_drawn"] > 0
    assert len(checked) == 2
    assert max(checked) < 1e-4
    assert log["clip_ratio/region_mean"] == 0.0


def test_groups_that_stay_dead_by_the_named_reward_train_nothing(make_trainer):
    """The letters differ in every group, and the answer in none of every second prompt."""
    settings = {"num_rollouts": 8, "dynamic_sampling": "answer", "dynamic_sampling_rounds": 1, "max_steps": 3}
    trainer = make_trainer(reward=[letter_reward, answer], per_device_train_batch_size=16, **settings)
    batches, live_and_dead = batches_of(trainer), []

    @around(trainer, "_generate_and_score_completions")
    def built(build, inputs):
        batch = build(inputs)
        found = trainer.rollouts
        prompts = of_rollouts(found, found.prompts)
        dead = torch.tensor([prompts[8 * group] in DEAD for group in trained_groups(found)])
        assert torch.equal((found.advantages.view(len(dead), -1) == 0).all(dim=1), dead)
        assert torch.equal(found.advantages.flatten(), batch["advantages"])
        assert (found.kept_rewards().std(dim=1) > 0).all()
        live_and_dead.extend(dead.tolist())
        return batch

    trainer.train()
    assert len(batches) == 3
    assert set(live_and_dead) == {True, False}


def test_rounds_without_a_live_prompt_end_and_are_reported_once(make_trainer, caplog, monkeypatch):
    """After 64 prompts in a row without a signal no more are drawn for the batch."""
    monkeypatch.setattr("pods_rl.engines.measuring.GIVE_UP_AFTER", 64)
    settings = {"num_rollouts": 4, "reward": constant, "max_completion_length": 1, "max_steps": 2}
    trainer = make_trainer(dynamic_sampling="constant", dynamic_sampling_rounds=1000, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["pods/dynamic_sampling/prompts_drawn"] == 64
    (said,) = [record.getMessage() for record in caplog.records if "Dynamic sampling" in record.getMessage()]
    assert "'constant'" in said


def test_dynamic_sampling_that_cannot_work_is_refused(make_trainer, dataset):
    stream = IterableDataset.from_generator(lambda: iter(dataset.to_list()))
    for words, config in (
        ("'nope'", {"dynamic_sampling": "nope"}),
        ("a stream", {"train_dataset": stream}),
        ("dynamic_sampling_rounds = 0", {"dynamic_sampling_rounds": 0}),
    ):
        with pytest.raises(UserError, match=words):
            make_trainer(**{"dynamic_sampling": True} | config)
