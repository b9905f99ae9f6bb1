"""Every engine keeps the same rows of the same rewards and masks (`same_rows`).

Here is TRL's trainer; slime and ROLL are in `test_other_engines.py`, the real verl and SkyRL in tests/verl and
tests/skyrl. A group with fewer than m usable rollouts depends on what an engine can take: verl gets fewer rows, TRL
and slime get m of which the others train nothing, SkyRL and ROLL train none.
"""

import torch
from datasets import Dataset

from pods_rl.engines.seeds import seeded_generator
from pods_rl.engines.verl.groups import choose
from pods_rl.selection import advantages, select

from .conftest import batches_of, kept_of
from .same_rows import KEPT, NAMES, REWARDS, TOKENS, M, N, usable


def test_verl_trains_something_of_a_batch_without_a_group_to_compare():
    kept_PN = choose(torch.ones(2, 4), 2, "max_variance", batch_rule="max_variance")
    assert kept_PN.tolist() == [[True, True, False, False]] * 2
    assert choose(torch.ones(1, 1), 1, "max_variance", batch_rule="max_variance").tolist() == [[True]]


def numbers(prompts):
    return [int(prompt.strip("=")) for prompt in prompts]


def test_trl_keeps_them_and_trains_no_other(make_trainer):
    """A rollout function gives each rollout its tokens; its mask (`env_mask`) leaves some none of the policy."""
    groups = len(KEPT)

    def rollouts(prompts, trainer):
        found = numbers(prompts)
        ids = trainer.processing_class("123")["input_ids"][:3]
        places = [place % N for place in range(len(prompts))]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [ids for _ in prompts],
            "logprobs": [[-1.0] * 3 for _ in prompts],
            "env_mask": [[int(TOKENS[group][i] > 0)] * 3 for group, i in zip(found, places, strict=True)],
            "place": places,
        }

    def reward(prompts, place, **_):
        return [REWARDS[group][i] for group, i in zip(numbers(prompts), place, strict=True)]

    trainer = make_trainer(
        reward=reward,
        train_dataset=Dataset.from_dict({"prompt": [f"{group}=" for group in range(groups)]}),
        trainer_arguments={"rollout_func": rollouts},
        num_rollouts=N,
        per_device_train_batch_size=M * groups,
        max_steps=1,
    )
    batches = batches_of(trainer)
    trainer.train()
    record = trainer.rollouts
    order = numbers(record.prompts[::N])
    kept = {}
    for group, indices, advantages_M in zip(
        order, kept_of(record).tolist(), record.advantages.view(-1, M), strict=True
    ):
        kept[group] = [i for i in indices if usable(group, i)]
        fillers = torch.tensor([not usable(group, i) for i in indices])
        assert (advantages_M[fillers] == 0).all(), NAMES[group]
        rewards_1M = torch.tensor([[REWARDS[group][i] or 0.0 for i in kept[group]]], dtype=torch.float64)
        if kept[group]:
            expected = advantages(rewards_1M, select(rewards_1M, rewards_1M.shape[1]))[0]
            torch.testing.assert_close(advantages_M[~fillers].double(), expected, rtol=1e-4, atol=1e-6)
    assert [kept[group] for group in range(groups)] == KEPT
    masked = sum(tokens == 0 for group in TOKENS for tokens in group)
    log = trainer.state.log_history[0]
    assert log["pods/masked_rollouts"] == masked
    assert log["pods/unusable_rewards"] == 3  # inf, -inf and 1e20; the nine NaN and None mean no reward
    assert log["pods/unscored_rollouts"] == 3 + 9
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())
    assert len(batches[0]["completion_ids"]) == M * groups


def test_trl_draws_by_the_formula_of_every_engine(make_trainer):
    trainer = make_trainer(rule="random", num_rollouts=N, max_steps=1)
    trainer.train()
    found = trainer.rollouts
    generator = seeded_generator(3, 0, 0)  # the run's seed, the steps before, and the generations of the step before
    assert kept_of(found).equal(select(found.rewards, M, "random", generator).indices)
