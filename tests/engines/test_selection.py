"""What selection and advantages read in training: truncated rollouts and sums of rewards."""

import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from pods_rl.selection import advantages, select

from .conftest import batches_of, kept_of, letter_reward, texts_of

# -- truncated rollouts that the loss masks out ------------------------------------------------------------------------

MASKING = {"num_rollouts": 12, "mask_truncated_completions": True, "max_completion_length": 2, "max_steps": 1}


def truncated(trainer) -> torch.Tensor:
    """Which rollouts have no token that ends them, `[G, N]`; in one process, in the order of their numbers."""
    found = trainer.rollouts
    ends = set("0123456789")
    cut = torch.zeros(found.rewards.numel(), dtype=torch.bool)
    for number, text, tokens in zip(found.numbers, found.completions, found.completion_tokens, strict=True):
        cut[number] = tokens >= MASKING["max_completion_length"] and text[-1:] not in ends
    return cut.view(found.rewards.shape)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantages": "before"},
        pytest.param({"scale_rewards": "batch"}, marks=pytest.mark.slow),
        pytest.param({"exact_trl": True}, marks=pytest.mark.slow),
    ],
)
def test_a_truncated_rollout_is_kept_only_to_fill_a_row_and_then_trains_nothing(make_trainer, settings):
    trainer = make_trainer(log_completions=True, **MASKING, **settings)
    batches = batches_of(trainer)
    trainer.train()
    found, cut_PN = trainer.rollouts, truncated(trainer)
    assert cut_PN.any()
    assert (~cut_PN).any()
    assert trainer.state.log_history[0]["pods/masked_rollouts"] == cut_PN.sum()
    texts = [found.completions[found.numbers.index(number)] for number in range(24)]
    assert found.rewards.flatten().tolist() == pytest.approx(letter_reward(texts)), "the ledger has all rewards"
    scored_PN = found.rewards.masked_fill(cut_PN, math.nan)
    expected = select(scored_PN, 4)
    assert torch.equal(kept_of(found), expected.indices)
    way = {"when": settings.get("advantages", "after"), "scale": settings.get("scale_rewards", "group")}
    expected_PM = advantages(scored_PN, expected, **way)
    torch.testing.assert_close(found.advantages.double(), expected_PM.flatten(), rtol=1e-4, atol=1e-6)
    kept_cut = expected.take(cut_PN)
    assert kept_cut.any(), "some row is filled with one"
    assert (found.advantages.view(kept_cut.shape)[kept_cut] == 0).all()
    masked_rows = batches[0]["completion_mask"].sum(dim=1) == 0
    assert torch.equal(masked_rows, kept_cut.flatten())
    shown = list(texts_of(trainer)["rewards"]["letter_reward"])[-8:]
    assert shown == pytest.approx(expected.take(found.rewards).flatten().tolist())


def test_without_masking_a_truncated_rollout_is_selected_like_any_other(make_trainer):
    trainer = make_trainer(**MASKING | {"mask_truncated_completions": False})
    trainer.train()
    assert torch.equal(kept_of(trainer.rollouts), select(trainer.rollouts.rewards, 4).indices)
    assert "pods/masked_rollouts" not in trainer.state.log_history[0]


def test_a_group_is_dead_if_the_rewards_of_its_complete_rollouts_are_equal(make_trainer):
    """Here the truncated ones alone have a reward: without masking every group would be live."""

    def unfinished(completions, completion_ids, **_):
        limit, ends = MASKING["max_completion_length"], set("0123456789")
        pairs = zip(completions, completion_ids, strict=True)
        return [float(len(ids) == limit and text[-1:] not in ends) for text, ids in pairs]

    settings = {"dynamic_sampling": True, "dynamic_sampling_rounds": 1}
    trainer = make_trainer(reward=unfinished, **MASKING | settings)
    trainer.train()
    found = trainer.rollouts
    assert torch.equal(found.masked, found.rewards > 0)
    assert (found.masked.any(dim=1) & ~found.masked.all(dim=1)).all()
    assert trainer.state.log_history[0]["pods/dynamic_sampling/live_share"] == 0.0
    assert (found.advantages == 0).all()


# -- groups that are constant up to rounding ---------------------------------------------------------------------------


def parts(column: int, **_):
    """A reward function that returns one of three parts, in another order for each rollout."""

    def part(completions, **_):
        return [(0.1, 0.2, 0.05)[(i + column) % 3] for i in range(len(completions))]

    part.__name__ = f"part_{column}"
    return part


def rounded(completions, **_):
    """Equal up to the last place of float32."""
    return [0.35 if i % 2 else 0.35 + 2**-25 for i in range(len(completions))]


SUM = [parts(0), parts(1), parts(2)]


@pytest.mark.parametrize(
    ("reward", "n", "settings"),
    [(SUM, 4, {}), (rounded, 4, {}), (SUM, 8, {"scale_rewards": "none"}), (rounded, 8, {"advantages": "before"})],
)
def test_rounding_of_a_sum_is_not_a_signal(make_trainer, reward, n, settings):
    trainer = make_trainer(reward=reward, num_rollouts=n, max_steps=1, skip_zero_advantage_steps=True, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (trainer.rollouts.advantages == 0).all()
    assert log["pods/skipped_step"] == 1.0
    assert log["pods/zero_variance_share"] == 1.0
    assert trainer.rollouts.rewards.dtype == torch.float64


def close(completions, **_):
    """Rewards of a group that differ by 0.1."""
    return [0.3 + 0.1 * (i % 2) for i in range(len(completions))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dynamic_sampling": True},
        pytest.param({"exact_trl": True}, marks=pytest.mark.slow),
        pytest.param({"advantages": "before", "num_rollouts": 8}, marks=pytest.mark.slow),
    ],
)
def test_rewards_within_the_tolerance_are_no_signal(make_trainer, settings):
    common = {"max_steps": 1, "dynamic_sampling_rounds": 1, **settings}
    for tolerance, is_dead in ((0.1, True), (0.099, False)):
        trainer = make_trainer(reward=close, reward_tolerance=tolerance, **common)
        trainer.train()
        log = trainer.state.log_history[0]
        assert (trainer.rollouts.advantages == 0).all().item() == is_dead
        assert log["pods/zero_variance_share"] == is_dead
        assert log.get("pods/dynamic_sampling/live_share", 1 - is_dead) == 1 - is_dead


def test_each_function_s_rounding_is_not_a_signal_where_each_is_normalised(make_trainer):
    """Otherwise the sums would be normalised rounding, up to 0.001 in size."""
    settings = {"multi_objective_aggregation": "normalize_then_sum", "max_steps": 1}
    for n in (4, 8):
        trainer = make_trainer(reward=[rounded, letter_reward], num_rollouts=n, reward_weights=[1.0, 0.0], **settings)
        trainer.train()
        assert (trainer.rollouts.rewards == 0).all()
        assert (trainer.rollouts.advantages == 0).all()


def test_exact_trl_keeps_the_numbers_of_trl_at_n_equal_to_m(make_trainer):
    batches = []
    for trainer in (
        make_trainer(GRPOTrainer, GRPOConfig, reward=rounded, max_steps=1),
        make_trainer(reward=rounded, max_steps=1, exact_trl=True),
    ):
        built = batches_of(trainer)
        trainer.train()
        batches += built
    assert (batches[0]["advantages"] != 0).any()
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])
