"""Dynamic sampling: groups whose rewards are all equal are replaced by groups of new prompts."""

from __future__ import annotations

import pytest
import torch
from datasets import IterableDataset

from pods_rl.errors import UserError

from .conftest import PROMPTS, batches_of, constant, letter_reward

DEAD = PROMPTS[::2]
SETTINGS = {"num_rollouts": 8, "dynamic_sampling": True, "per_device_train_batch_size": 16, "max_steps": 1}


def dead_for_half(prompts, completions, **_):
    """Constant for every second prompt of the data set."""
    letters = letter_reward(completions)
    return [0.5 if prompt in DEAD else score for prompt, score in zip(prompts, letters, strict=True)]


def answer(prompts, completions, **_):
    """1 for the even rollouts of a prompt that is not dead."""
    return [float(i % 2 and prompt not in DEAD) for i, prompt in enumerate(prompts)]


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
    assert not {prompts[8 * group] for group in found.groups.tolist()} & set(DEAD)
    kept = found.kept_rewards()
    centred = kept - kept.mean(dim=1, keepdim=True)
    deviation = kept.std(dim=1, keepdim=True) if scale == "group" else kept.std()
    torch.testing.assert_close(found.advantages, centred / (deviation + 1e-4), rtol=1e-4, atol=1e-6)
    everything = torch.tensor(of_rollouts(found, dead_for_half(found.prompts, found.completions)))
    assert log["reward"] == pytest.approx(everything.mean().item(), abs=1e-6)


def test_the_rows_of_a_joined_batch_are_those_of_its_groups(make_trainer):
    trainer = make_trainer(reward=dead_for_half, beta=0.1, **SETTINGS)
    batches = batches_of(trainer)
    trainer.train()
    (batch,), found, tokenizer = batches, trainer.rollouts, trainer.processing_class
    prompts, completions = of_rollouts(found, found.prompts), of_rollouts(found, found.completions)
    for row, number in enumerate(found.kept_numbers().tolist()):
        for part, text in (("prompt", prompts[number]), ("completion", completions[number])):
            ids = batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    mask = batch["completion_mask"]
    assert batch["num_items_in_batch"] == mask.sum()
    assert (batch["ref_per_token_logps"][mask.bool()] < 0).all()


def test_a_named_reward_decides_which_groups_are_dead(make_trainer):
    settings = {"num_rollouts": 8, "max_steps": 1, "dynamic_sampling_rounds": 8}
    trainer = make_trainer(reward=[letter_reward, answer], dynamic_sampling="answer", **settings)
    trainer.train()
    found = trainer.rollouts
    prompts = of_rollouts(found, found.prompts)
    assert not {prompts[8 * group] for group in found.groups.tolist()} & set(DEAD)


def test_groups_stay_dead_after_the_last_round(make_trainer):
    settings = {"num_rollouts": 8, "dynamic_sampling": True, "dynamic_sampling_rounds": 2, "max_steps": 1}
    trainer = make_trainer(reward=constant, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["pods/dynamic_sampling/prompts_drawn"] == 4
    assert log["pods/dynamic_sampling/live_share"] == 0
    assert len(trainer.rollouts.rewards) == 6
    assert trainer.rollouts.groups.tolist() == [0, 1]


def test_dynamic_sampling_that_cannot_work_is_refused(make_trainer, dataset):
    stream = IterableDataset.from_generator(lambda: iter(dataset.to_list()))
    for words, config in (
        (r"'nope' is not a reward function: got letter_reward", {"dynamic_sampling": "nope"}),
        ("a stream", {"train_dataset": stream}),
        ("dynamic_sampling_rounds = 0", {"dynamic_sampling_rounds": 0}),
        ("sum_then_normalize", {"multi_objective_aggregation": "normalize_then_sum"}),
    ):
        with pytest.raises(UserError, match=words):
            make_trainer(**{"dynamic_sampling": True} | config)
