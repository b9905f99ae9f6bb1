"""Advantages against worked values, numpy, and TRL's formula to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pods_rl.selection import Selection, advantages, select

pytestmark = pytest.mark.numeric

NAN = math.nan
ways = pytest.mark.parametrize("scale", ["group", "batch", "none"])
times = pytest.mark.parametrize("when", ["after", "before"])


def everything(rewards_PN: torch.Tensor) -> Selection:
    prompts, n = rewards_PN.shape
    return Selection(torch.arange(n).expand(prompts, n))


def by_hand(rewards_PN: np.ndarray, indices_PM: np.ndarray, when: str, scale: str) -> np.ndarray:
    """One number at a time, as the docstring says."""
    kept_PM = np.take_along_axis(rewards_PN, indices_PM, axis=1)
    reference = kept_PM if when == "after" else rewards_PN
    out_PM = np.zeros(kept_PM.shape)
    for p, m in np.ndindex(*kept_PM.shape):
        group = reference[p][~np.isnan(reference[p])]
        if math.isnan(kept_PM[p, m]) or len(set(group)) == 1:
            continue
        spread = {"group": group, "batch": reference[~np.isnan(reference)], "none": None}[scale]
        divisor = 1.0 if spread is None else np.std(spread, ddof=1) + 1e-4
        out_PM[p, m] = (kept_PM[p, m] - group.mean()) / divisor
    return out_PM


@times
@ways
def test_every_way_agrees_with_plain_numpy(when: str, scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_PN = torch.randn(12, 10, generator=generator, dtype=torch.float64)
    rewards_PN[3], rewards_PN[4, 1:], rewards_PN[5] = 0.7, NAN, NAN
    rewards_PN[6:9].masked_fill_(torch.rand(3, 10, generator=generator) < 0.4, NAN)
    kept = select(rewards_PN, 4)
    expected_PM = by_hand(rewards_PN.numpy(), kept.indices.numpy(), when, scale)
    ours_PM = advantages(rewards_PN, kept, when=when, scale=scale)
    np.testing.assert_allclose(ours_PM.numpy(), expected_PM, rtol=1e-12, atol=1e-12)


@times
@pytest.mark.parametrize("scale", ["batch", "none"])
def test_leave_one_out_agrees_with_one_number_at_a_time(when: str, scale: str) -> None:
    generator = torch.Generator().manual_seed(4)
    rewards_PN = torch.randn(9, 10, generator=generator, dtype=torch.float64)
    rewards_PN[3], rewards_PN[4, 1:], rewards_PN[5] = 0.7, NAN, NAN
    rewards_PN[6:].masked_fill_(torch.rand(3, 10, generator=generator) < 0.4, NAN)
    kept = select(rewards_PN, 4)
    reference = kept.take(rewards_PN).numpy() if when == "after" else rewards_PN.numpy()
    alone_PR = np.full(reference.shape, NAN)
    for p, i in np.ndindex(*reference.shape):
        others = np.delete(reference[p], i)
        if (~np.isnan(others)).any():
            alone_PR[p, i] = reference[p, i] - np.nanmean(others)
    if scale == "batch":
        alone_PR = (alone_PR - np.nanmean(alone_PR)) / (np.nanstd(alone_PR, ddof=1) + 1e-4)
    alone_PR[3] = 0.0  # equal rewards teach nothing
    expected_PM = alone_PR if when == "after" else np.take_along_axis(alone_PR, kept.indices.numpy(), axis=1)
    ours_PM = advantages(rewards_PN, kept, when=when, scale=scale, baseline="leave_one_out")
    np.testing.assert_allclose(ours_PM.numpy(), np.nan_to_num(expected_PM, nan=0.0), rtol=1e-9, atol=1e-12)


def test_leave_one_out_by_hand() -> None:
    rewards_PN = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.5]])
    kept = Selection(torch.tensor([[0, 1, 2]]))
    after = advantages(rewards_PN, kept, scale="none", baseline="leave_one_out")
    assert after.tolist() == [[1.0, -0.5, -0.5]]
    before = advantages(rewards_PN, kept, when="before", scale="none", baseline="leave_one_out")
    assert before.tolist() == [[0.625, -0.625, -0.625]]
    centred = advantages(rewards_PN, kept, scale="none")
    torch.testing.assert_close(after, centred * 3 / 2)


def test_leave_one_out_is_not_scaled_by_the_deviation_of_all() -> None:
    rewards_PN = torch.tensor([[1.0, 0.0]])
    with pytest.raises(ValueError, match="goes with scale 'none' or 'batch'; got 'group'"):
        advantages(rewards_PN, everything(rewards_PN), baseline="leave_one_out")


@ways
def test_all_kept_is_trl_to_the_last_bit(scale: str) -> None:
    """n = m must be plain GRPO: TRL's formula, on TRL's own nanstd and layout."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards_PN = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)) * 3 + 0.1
    rewards_PN[2, :5] = NAN
    rewards = rewards_PN.flatten()
    std = nanstd(rewards) if scale == "batch" else nanstd(rewards_PN, dim=1).repeat_interleave(16)
    expected = rewards - torch.nanmean(rewards_PN, dim=1).repeat_interleave(16)
    expected = torch.nan_to_num(expected if scale == "none" else expected / (std + 1e-4), nan=0.0)
    for when in ("after", "before"):
        ours_PM = advantages(rewards_PN, everything(rewards_PN), when=when, scale=scale)
        assert torch.equal(ours_PM.flatten(), expected)


def test_worked_values() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    kept = Selection(torch.tensor([[0, 1, 2, 4]]))
    after = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # mean 1/2, variance 4 (1/4) / 3
    before_std = math.sqrt((2 * (2 / 3) ** 2 + 4 * (1 / 3) ** 2) / 5) + 1e-4  # mean 1/3 of all six
    assert advantages(rewards, kept)[0].tolist() == pytest.approx([after, -after, -after, after], rel=1e-12)
    expected = [2 / 3 / before_std, -1 / 3 / before_std, -1 / 3 / before_std, 2 / 3 / before_std]
    assert advantages(rewards, kept, when="before")[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert advantages(rewards, kept, epsilon=0.5)[0, 0] == pytest.approx(0.5 / (math.sqrt(1 / 3) + 0.5))


@times
@ways
@pytest.mark.parametrize("value", [0.1, -1e30, 0.0])
def test_constant_groups_are_exactly_zero(when: str, scale: str, value: float) -> None:
    rewards_PN = torch.randn(3, 48, generator=torch.Generator().manual_seed(2))
    rewards_PN[1] = value
    rewards_PN[1, 0] = NAN
    ours_PM = advantages(rewards_PN, select(rewards_PN, 11), when=when, scale=scale)
    assert (ours_PM[1] == 0).all()
    assert (ours_PM[0] != 0).any() or (value < 0 and scale == "batch")


@ways
def test_one_kept_rollout_has_no_deviation(scale: str) -> None:
    rewards_PN = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    kept = select(rewards_PN, 1, rule="max_reward")
    assert (advantages(rewards_PN, kept, scale=scale) == 0).all()
    assert (advantages(rewards_PN, kept, when="before", scale=scale) > 0).all()
    alone = torch.tensor([[0.3]])
    assert advantages(alone, everything(alone), scale=scale).tolist() == [[0.0]]


@times
@ways
def test_unscored_rollouts_have_advantage_zero(when: str, scale: str) -> None:
    rewards_PN = torch.tensor([[NAN, 1.0, NAN, 0.0], [NAN, NAN, 0.4, NAN], [NAN, NAN, NAN, NAN]])
    ours_PM = advantages(rewards_PN, select(rewards_PN, 3), when=when, scale=scale)
    assert ours_PM[0, 0] == 0
    assert ours_PM[0, 1] == -ours_PM[0, 2] > 0
    assert (ours_PM[1:] == 0).all()


@times
@pytest.mark.parametrize(
    ("dtype", "huge"),
    [(torch.float32, 1e38), (torch.float32, 3.4e38), (torch.float64, 1.7e308), (torch.float32, 1e20)],
)
def test_huge_rewards_do_not_overflow(when: str, dtype: torch.dtype, huge: float) -> None:
    shape_PN = torch.tensor([[0.0, 1.0, -1.0, 0.25], [1.0, 1.0, -1.0, -1.0]], dtype=dtype)
    kept = Selection(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    ordinary_PM = advantages(shape_PN, kept, when=when, epsilon=0.0)
    torch.testing.assert_close(advantages(shape_PN * huge, kept, when=when), ordinary_PM)
    beside_PN = torch.cat([shape_PN, shape_PN * huge])
    beside = Selection(torch.cat([kept.indices, kept.indices]))
    assert torch.equal(advantages(beside_PN, beside, when=when)[:2], advantages(shape_PN, kept, when=when))
    batch_PM = advantages(beside_PN, beside, when=when, scale="batch")
    exact_PN = (torch.cat([shape_PN * 0.0, shape_PN]) * 1e6).double().numpy()  # 1 beside 1e20 and more is nothing
    expected_PM = by_hand(exact_PN, beside.indices.numpy(), when, "batch")
    np.testing.assert_allclose(batch_PM.numpy(), expected_PM, rtol=1e-5, atol=1e-15)
    halved_PM = advantages(shape_PN * (huge / 4), kept, when=when, scale="none")
    torch.testing.assert_close(halved_PM / (huge / 4), advantages(shape_PN, kept, when=when, scale="none"))


def test_a_difference_beyond_the_dtype_is_refused() -> None:
    rewards = torch.tensor([[0.0, 0.1], [3.3e38, -3.3e38], [0.0, 1.0]])
    ok = advantages(rewards, everything(rewards), scale="none")
    assert ok.isfinite().all()
    rewards = torch.tensor([[0.0, 0.1, 0.0], [3.3e38, -3.3e38, -3.3e38], [0.0, 1.0, 0.0]])
    with pytest.raises(ValueError, match=r"rewards of group 1 differ by more than torch.float32 can hold"):
        advantages(rewards, everything(rewards), scale="none")


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float64),
        (torch.bool, torch.float64),
    ],
)
def test_dtypes(dtype: torch.dtype, result: torch.dtype) -> None:
    rewards = torch.tensor([[1, 0, 0, 1]]).to(dtype)
    ours = advantages(rewards, everything(rewards))
    assert ours.dtype == result
    torch.testing.assert_close(ours.double(), torch.tensor([[1.0, -1, -1, 1]]).double() * 0.8658755, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"when": "during"}, "when must be one of after, before; got 'during'"),
        ({"scale": "groups"}, "scale must be one of group, batch, none; got 'groups'"),
    ],
)
def test_unknown_choices_are_named(change: dict, message: str) -> None:
    rewards = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        advantages(rewards, everything(rewards), **change)


def test_misfits_are_named() -> None:
    kept = Selection(torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match="n - 1 = 2; got 0 to 3"):
        advantages(torch.zeros(1, 3), kept)
    with pytest.raises(ValueError, match=r"1 prompts needs values .* shape \[2, 4\]"):
        advantages(torch.zeros(2, 4), kept)
    with pytest.raises(ValueError, match="1 of 4 rewards are infinite, in group 0"):
        advantages(torch.tensor([[0.0, math.inf, 0.0, 0.0]]), kept)
