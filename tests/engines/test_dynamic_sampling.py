"""Dynamic sampling: groups whose rewards are all equal are replaced by groups of new prompts."""

import pytest
import torch
from datasets import IterableDataset
from trl import GRPOTrainer

from pods_rl.errors import UserError

from .conftest import PROMPTS, around, batches_of, constant, letter_reward

DEAD = PROMPTS[::2]
SETTINGS = {"num_rollouts": 8, "dynamic_sampling": True, "per_device_train_batch_size": 16, "max_steps": 1}


def dead_for_half(prompts, completions, **_):
    """Constant for every second prompt of the data set."""
    letters = letter_reward(completions)
    return [0.5 if prompt in DEAD else score for prompt, score in zip(prompts, letters, strict=True)]


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


def test_groups_stay_dead_after_the_last_round(make_trainer):
    settings = {"num_rollouts": 8, "dynamic_sampling": True, "dynamic_sampling_rounds": 2, "max_steps": 1}
    trainer = make_trainer(reward=constant, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["pods/dynamic_sampling/prompts_drawn"] == 4
    assert log["pods/dynamic_sampling/live_share"] == 0
    assert len(trainer.rollouts.rewards) == 6
    assert trained_groups(trainer.rollouts) == [0, 1]


@pytest.mark.parametrize("prefix_tree", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_joined_batch_has_the_rows_of_its_groups_and_their_log_probabilities(make_trainer, prefix_tree):
    settings = SETTINGS | {"num_iterations": 2, "beta": 0.1, "prefix_tree": prefix_tree, "dynamic_sampling_rounds": 8}
    trainer = make_trainer(reward=dead_for_half, **settings)
    batches = batches_of(trainer)
    apart = []

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
            apart.append((batch[name] - expected)[real].abs().max().item())
        return batch

    trainer.train()
    log = trainer.state.log_history[0]
    assert log["pods/dynamic_sampling/prompts_drawn"] > 0
    assert log["clip_ratio/region_mean"] == 0.0
    assert len(apart) == 2
    assert max(apart) < 1e-4
    (batch,), found, tokenizer = batches, trainer.rollouts, trainer.processing_class
    prompts, completions = of_rollouts(found, found.prompts), of_rollouts(found, found.completions)
    for row, number in enumerate(found.kept.tolist()):
        for part, text in (("prompt", prompts[number]), ("completion", completions[number])):
            ids = batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_dynamic_sampling_of_a_stream_is_refused(make_trainer, dataset):
    stream = IterableDataset.from_generator(lambda: iter(dataset.to_list()))
    with pytest.raises(UserError, match="a stream"):
        make_trainer(dynamic_sampling=True, train_dataset=stream)
