"""The generator in SkyRL's own data path, with scripted rewards: which rows it returns, and their advantages.

Real: `prepare_generator_input`, the trainers and all of their steps from a generator's output to advantages. Replaced:
the generator (`parts.Scripted`), and the workers (`parts.Dispatch`), of which these steps ask one number.
"""

import asyncio
import math

import numpy as np
import pytest
import torch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.generators.utils import prepare_generator_input

from pods_rl.engines.seeds import seeded_generator
from pods_rl.engines.skyrl.generator import PODSGenerator
from pods_rl.errors import UserError
from pods_rl.selection import advantages, select

from ..engines import same_rows
from .parts import Scripted

P = 120
N = 16
M = 4


@pytest.fixture(scope="module")
def rewards():
    """Groups of few values, so that ties are common; the first has equal rewards."""
    draw = torch.Generator().manual_seed(0)
    rewards_PN = torch.randint(0, 5, (P, N), generator=draw).double() / 4
    rewards_PN[0] = 0.5
    return rewards_PN


def prompts(count):
    return [
        {
            "prompt": [{"role": "user", "content": f"prompt {number}"}],
            "env_class": "digits",
            "env_extras": {"reward_spec": {"ground_truth": str(number)}},
            "uid": str(number),
        }
        for number in range(count)
    ]


def batch(count, m=M, phase="train", step=3):
    return prepare_generator_input(prompts(count), m, None, "digits", phase, step)


class ListOfPrompts(list):
    """Replaces SkyRL's data set, which reads a file."""

    collate_fn = list


def of_table(rewards_PN):
    return lambda uid, number: rewards_PN[int(uid), number].item()


def train_step(trainer, generator_input, uids):
    """As in `RayPPOTrainer.train`, from generation to advantages."""
    output = asyncio.run(trainer.generate(generator_input))
    if trainer.cfg.generator.step_wise_trajectories:
        uids = [trajectory_id.instance_id for trajectory_id in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    data["values"] = None
    return output, trainer.compute_advantages_and_returns(data)


def of_rows(data):
    """The advantage of each row: all of its response tokens have it."""
    mask = data["response_mask"].bool()
    rows = []
    for row, row_mask in zip(data["advantages"], mask, strict=True):
        values = row[row_mask]
        assert (values == values[0]).all()
        rows.append(values[0])
    return torch.stack(rows)


SETTINGS = [
    ([], {"epsilon": 1e-6}),
    (["trainer.algorithm.grpo_norm_by_std=false"], {"scale": "none"}),
    (["trainer.algorithm.advantage_estimator=rloo"], {"baseline": "leave_one_out", "scale": "none"}),
]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("overrides", "options"), SETTINGS)
def test_the_selected_rows_are_trained_with_their_advantages(
    make_config, make_trainer, rewards, overrides, options, per_token
):
    config = make_config(f"trainer.train_batch_size={P}", "trainer.policy_mini_batch_size=40", *overrides)
    inner = Scripted(of_table(rewards), per_token=per_token)
    trainer = make_trainer(config, PODSGenerator(inner, config, num_rollouts=N))
    generator_input, uids = batch(P)
    output, data = train_step(trainer, generator_input, uids)

    (asked,) = inner.batches
    assert [(i.instance_id, i.repetition_id) for i in asked["trajectory_ids"]] == [
        (str(p), n) for p in range(P) for n in range(N)
    ]
    assert len({id(extras) for extras in asked["env_extras"]}) == P * N  # SkyRL's generator writes into them
    assert len(generator_input["prompts"]) == P * M
    kept = select(rewards, M)
    numbers = kept.indices.flatten().tolist()
    assert [ids[0] - 20 for ids in output["response_ids"]] == numbers
    assert [values[0] for values in output["rollout_logprobs"]] == [-0.5 - number for number in numbers]
    assert [metrics["number"] for metrics in output["env_metrics"]] == numbers
    places = [place // M * N + number for place, number in enumerate(numbers)]
    assert output["trajectory_generation_times"] == places
    assert output["trajectory_time_splits"] == {"llm": places, "env": [place / 2 for place in places]}
    assert data["rewards"].sum(-1).tolist() == kept.take(rewards).flatten().tolist()
    torch.testing.assert_close(
        of_rows(data).view(P, M).double(), advantages(rewards, kept, **options), atol=2e-6, rtol=2e-6
    )
    assert of_rows(data).view(P, M).sum(1).abs().max() < 1e-5
    assert data.metadata["policy_mini_batch_boundaries"] == [(0, 160), (160, 320), (320, 480)]
    assert trainer.all_metrics["pods/all/rows"] == P * N
    assert trainer.all_metrics["pods/selected/rows"] == P * M
    assert trainer.all_metrics["pods/all/reward_mean"] == pytest.approx(rewards.mean().item())
    assert trainer.all_metrics["reward/avg_raw_reward"] == pytest.approx(kept.take(rewards).mean().item())
    lengths = [2 + number % 3 for number in range(N)]
    assert trainer.all_metrics["generate/avg_num_tokens"] == pytest.approx(np.mean(lengths))  # of all n


def test_step_wise_trajectories_are_kept_with_all_of_their_turns(make_config, make_trainer, rewards):
    config = make_config(
        f"trainer.train_batch_size={P}",
        "trainer.policy_mini_batch_size=40",
        "generator.step_wise_trajectories=true",
    )

    def turns(uid, number):
        return 1 + (int(uid) + number) % 3

    inner = Scripted(of_table(rewards), turns=turns, per_token=True)
    trainer = make_trainer(config, PODSGenerator(inner, config, num_rollouts=N))
    output, data = train_step(trainer, *batch(P))
    kept = select(rewards, M)
    expected_rows = []
    expected_advantages = []
    advantages_PM = advantages(rewards, kept, epsilon=1e-6)
    for p, indices in enumerate(kept.indices.tolist()):
        for place, number in enumerate(indices):
            count = turns(str(p), number)
            expected_rows += [(str(p), number)] * count
            expected_advantages += [advantages_PM[p, place].item()] * count
    assert [(i.instance_id, i.repetition_id) for i in output["trajectory_ids"]] == expected_rows
    torch.testing.assert_close(of_rows(data).double(), torch.tensor(expected_advantages).double(), atol=2e-6, rtol=2e-6)
    assert trainer.all_metrics["pods/selected/rows"] == len(expected_rows)


def test_step_wise_turns_without_their_ends_are_refused(make_config):
    config = make_config("generator.step_wise_trajectories=true")
    generator = PODSGenerator(Scripted(lambda uid, number: 1.0), config, num_rollouts=8)
    with pytest.raises(RuntimeError, match="is_last_step"):
        asyncio.run(generator.generate(batch(2)[0]))


@pytest.mark.parametrize(("rule", "n"), [("percentile", N), ("random", M)])
def test_another_rule_keeps_m_of_each_prompt_and_n_equal_to_m_keeps_all(make_config, make_trainer, rewards, rule, n):
    config = make_config("trainer.train_batch_size=20")
    generator = PODSGenerator(Scripted(of_table(rewards)), config, num_rollouts=n, rule=rule)
    output, _ = train_step(make_trainer(config, generator), *batch(20))
    numbers = torch.tensor([ids[0] - 20 for ids in output["response_ids"]]).view(20, M)
    assert numbers.equal(select(rewards[:20, :n], M, rule).indices)


def test_a_drawing_rule_depends_on_seed_step_and_prompt_and_not_on_the_batch(make_config, rewards):
    config = make_config()

    def drawn(count, seed=0, step=3):
        generator = PODSGenerator(Scripted(of_table(rewards)), config, num_rollouts=N, rule="random", seed=seed)
        output = asyncio.run(generator.generate(batch(count, step=step)[0]))
        return [ids[0] for ids in output["response_ids"]]

    first = drawn(2)
    expected = select(rewards[:1], M, "random", seeded_generator(0, 3, "0")).indices[0].tolist()  # as every engine
    assert first[:M] == [20 + number for number in expected]
    assert drawn(6)[: 2 * M] == first
    assert drawn(2, seed=1) != first
    assert drawn(2, step=4) != first
    assert first[:M] != first[M:]


def test_batches_of_other_than_m_rows_a_prompt_or_of_an_unknown_phase_are_refused(make_config, rewards):
    generator = PODSGenerator(Scripted(of_table(rewards)), make_config(), num_rollouts=N)
    with pytest.raises(UserError, match="batch_metadata"):
        asyncio.run(generator.generate({**batch(2)[0], "batch_metadata": None}))
    with pytest.raises(UserError, match=r"\b4 rows .*\b9 rows"):
        asyncio.run(generator.generate(batch(3, m=3)[0]))
    with pytest.raises(UserError, match=r"2 prompts .*row 0"):
        asyncio.run(generator.generate(batch(4, m=3)[0]))
    ids = [TrajectoryID("a", number) for number in range(4)]
    two = {**batch(1)[0], "trajectory_ids": ids, "batch_metadata": BatchMetadata(1, "train")}
    of_ones = PODSGenerator(Scripted(lambda uid, number: 1.0), make_config(), num_rollouts=8)
    assert len(asyncio.run(of_ones.generate(two))["response_ids"]) == 4


def test_a_generator_that_loses_trajectories_is_refused(make_config, rewards):
    class Losing(Scripted):
        async def generate(self, input_batch, disable_tqdm=False):
            output = await super().generate(input_batch)
            return {name: values[:-1] if isinstance(values, list) else values for name, values in output.items()}

    generator = PODSGenerator(Losing(of_table(rewards)), make_config(), num_rollouts=N)
    with pytest.raises(RuntimeError, match=r"\b31 .*\b32\b"):
        asyncio.run(generator.generate(batch(2)[0]))


@pytest.mark.parametrize("per_token", [False, True])
def test_the_rows_of_every_engine_are_kept(make_config, make_trainer, per_token):
    """As `tests/engines/test_same_rows.py` has them for the others; of a group with fewer than m nothing is trained."""
    count = len(same_rows.KEPT)
    config = make_config(f"trainer.train_batch_size={count}")
    rewards = [[math.nan if reward is None else reward for reward in group] for group in same_rows.REWARDS]
    inner = Scripted(
        lambda uid, number: rewards[int(uid)][number],
        per_token=per_token,
        is_masked=lambda uid, number: same_rows.TOKENS[int(uid)][number] == 0,
    )
    trainer = make_trainer(config, PODSGenerator(inner, config, num_rollouts=same_rows.N))
    output, data = train_step(trainer, *batch(count))
    trained = data["loss_mask"].bool().any(dim=1)
    for group, kept in enumerate(same_rows.KEPT):
        rows = slice(group * M, (group + 1) * M)
        assert trained[rows].tolist() == [len(kept) == M] * M, same_rows.NAMES[group]
        if len(kept) == M:
            assert [ids[0] - 20 for ids in output["response_ids"][rows]] == kept
    assert (of_rows(data).view(count, M)[~trained.view(count, M)] == 0).all()
    assert trainer.all_metrics["pods/skipped_groups"] == 3
    places = [(group, i) for group in range(count) for i in range(same_rows.N)]
    assert trainer.all_metrics["pods/unusable_rewards"] == sum(not same_rows.usable(*place) for place in places)


def test_a_group_of_equal_rewards_has_almost_no_advantage_and_none_with_skyrls_filter(make_config, make_trainer):
    """SkyRL's mean of equal float32 rewards may be off by rounding, which it divides by at least 1e-6."""
    for overrides, trained in (([], True), (["trainer.algorithm.zero_variance_filter=true"], False)):
        config = make_config("trainer.train_batch_size=1", "generator.n_samples_per_prompt=3", *overrides)
        generator = PODSGenerator(Scripted(lambda uid, number: 0.1), config, num_rollouts=8)
        _, data = train_step(make_trainer(config, generator), *batch(1, m=3))
        assert of_rows(data).abs().max() < 0.05
        assert bool(data["loss_mask"].any()) == trained


def test_the_fully_asynchronous_trainer_trains_the_selected_rows(make_config, make_trainer, rewards):
    """Each group is generated alone, without a progress bar. SkyRL joins those of a step, and their metrics by name."""
    groups = 24
    config = make_config(
        f"trainer.train_batch_size={groups}",
        f"trainer.policy_mini_batch_size={groups}",
        "trainer.fully_async.enabled=true",
        "trainer.algorithm.policy_loss_type=rollout_is",
        f"trainer.fully_async.num_parallel_generation_workers={groups}",
    )
    inner = Scripted(of_table(rewards))
    generator = PODSGenerator(inner, config, num_rollouts=N)

    async def generate_all():
        made = []
        for prompt in prompts(groups):
            generator_input, _ = prepare_generator_input([prompt], M, None, "digits", "train", 1)
            made.append(generator.generate(generator_input, disable_tqdm=True))
        return await asyncio.gather(*made)

    outputs = asyncio.run(generate_all())
    assert inner.without_bar == [True] * groups
    trainer = make_trainer(config, generator, trainer=FullyAsyncRayPPOTrainer, train=ListOfPrompts(prompts(groups)))
    trainer.global_step = 1
    mini_batch = [
        GeneratedOutputGroup(generator_output=output, uid=str(number), global_step_when_scheduled=1)
        for number, output in enumerate(outputs)
    ]
    data = trainer.convert_generation_group_mini_batch_to_training_input(mini_batch)
    data["values"] = None
    kept = select(rewards[:groups], M)
    expected = advantages(rewards[:groups], kept, epsilon=1e-6)
    data = trainer.compute_advantages_and_returns(data)
    torch.testing.assert_close(of_rows(data).view(groups, M).double(), expected, atol=2e-6, rtol=2e-6)
    metrics = trainer.all_metrics
    assert metrics["pods/all/rows"] == groups * N
    assert metrics["pods/all/reward_mean"] == pytest.approx(rewards[:groups].mean().item())
    assert metrics["pods/zero_variance_share_mean"] == pytest.approx(1 / groups)
    assert metrics["pods/selected/reward_std_mean"] == pytest.approx(
        kept.take(rewards[:groups]).std(dim=1).mean().item()
    )


def test_a_generator_without_skyrls_progress_bar_is_called_as_it_is(make_config, rewards):
    class Plain:
        def __init__(self):
            self.inner = Scripted(of_table(rewards))

        async def generate(self, input_batch):
            return await self.inner.generate(input_batch)

    generator = PODSGenerator(Plain(), make_config(), num_rollouts=N)
    assert len(asyncio.run(generator.generate(batch(2)[0], disable_tqdm=True))["response_ids"]) == 2 * M
