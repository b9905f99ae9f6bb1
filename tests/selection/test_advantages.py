"""Advantages against worked values, and TRL's formula to the last bit. An oracle: test_ragged.py."""

import itertools
import math

import pytest
import torch

from pods_rl.selection import Selection, advantages, is_constant, select, select_batch, spread

pytestmark = pytest.mark.numeric

NAN = math.nan
ways = pytest.mark.parametrize("scale", ["group", "batch", "none"])
times = pytest.mark.parametrize("when", ["after", "before"])


def everything(rewards_PN: torch.Tensor) -> Selection:
    prompts, n = rewards_PN.shape
    return Selection(torch.arange(n).expand(prompts, n))


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


@times
@ways
@pytest.mark.parametrize("value", [0.1, -1e9, 0.0])
def test_constant_groups_are_exactly_zero(when: str, scale: str, value: float) -> None:
    rewards_PN = torch.randn(3, 48, generator=torch.Generator().manual_seed(2))
    rewards_PN[1] = value
    rewards_PN[1, 0] = NAN
    ours_PM = advantages(rewards_PN, select(rewards_PN, 11), when=when, scale=scale)
    assert (ours_PM[1] == 0).all()
    assert (ours_PM[0] != 0).any() or (value < 0 and scale == "batch")


def test_integers_are_computed_in_float64_and_half_precision_in_float32() -> None:
    for dtype, result in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bool, torch.float64)):
        rewards = torch.tensor([[1, 0, 0, 1]]).to(dtype)
        ours = advantages(rewards, everything(rewards))
        assert ours.dtype == result
        expected = torch.tensor([[1.0, -1, -1, 1]]).double() * 0.8658755
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=0)


FIRST_TWO = Selection(torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    ("selection", "change", "error", "message"),
    [
        (FIRST_TWO, {"when": "during"}, ValueError, "^when .*'during'"),
        (FIRST_TWO, {"baseline": "leave_one_out"}, ValueError, "'group'"),
        (FIRST_TWO, {"epsilon": NAN}, ValueError, "^epsilon .*nan"),
        (torch.tensor([[0, 1]]), {}, TypeError, r"Selection\(indices"),
    ],
)
def test_wrong_arguments_are_named(selection, change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        advantages(torch.tensor([[0.0, 1.0, 0.5]]), selection, **change)
    with pytest.raises(ValueError, match=r"rewards .*group 0"):
        advantages(torch.tensor([[0.0, math.inf, 0.5]]), FIRST_TWO)


@pytest.mark.parametrize("rewards", [[[0.0, 1.0]], torch.zeros(4)])
def test_rewards_that_are_not_a_tensor_of_groups_are_refused(rewards) -> None:
    kept = Selection(torch.tensor([[0, 1]]))
    for call in (lambda: advantages(rewards, kept), lambda: is_constant(rewards), lambda: spread(rewards)):
        with pytest.raises((TypeError, ValueError), match=r"^rewards "):
            call()


# -- groups that are constant up to rounding ---------------------------------------------------------------------------


def orders(parts: list[float], dtype: torch.dtype) -> torch.Tensor:
    """One group: the sum of equal parts in every order, computed in `dtype`."""
    sums = []
    for order in itertools.permutations(parts):
        total = torch.zeros((), dtype=dtype)
        for part in order:
            total = total + torch.tensor(part, dtype=dtype)
        sums.append(total)
    return torch.stack(sums)[None]


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [
        ([0.1, 0.2, 0.05], torch.float32),
        ([100.0, 0.1, 0.7, 0.3], torch.float32),
        ([0.1, 0.7, 1.1, 1.3, 0.3, 0.05], torch.float32),
        ([0.1, 0.2, -0.3], torch.float64),  # in float32 the sum is rounding alone, as large as rewards of 1e-8
    ],
)
def test_sums_of_equal_parts_in_two_orders_are_equal_rewards(parts: list[float], dtype: torch.dtype) -> None:
    rewards_PN = orders(parts, dtype)
    assert rewards_PN.amax() > rewards_PN.amin()
    assert is_constant(rewards_PN).tolist() == [True]
    n = rewards_PN.shape[1]
    for when in ("after", "before"):
        for kept in (select(rewards_PN, n // 2), everything(rewards_PN)):
            assert (advantages(rewards_PN, kept, when=when) == 0).all()


@pytest.mark.parametrize(("low", "high"), [(0.35, 0.35001), (1e6, 1e6 + 1), (-1e-9, 1e-9), (0, 1)])
def test_small_differences_are_still_differences(low: float, high: float) -> None:
    rewards_PN = torch.tensor([[low, high, low, high]], dtype=torch.float64)
    assert is_constant(rewards_PN).tolist() == [False]
    assert is_constant(rewards_PN.float()).tolist() == [False]
    assert (advantages(rewards_PN, everything(rewards_PN)) != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tolerance_is_absolute_and_includes_its_end(dtype: torch.dtype) -> None:
    rewards_PN = torch.tensor(
        [[0.3, 0.4, 0.35], [100.3, 100.4, NAN], [0.3, 0.401, 0.35], [-0.05, 0.06, 0.0]], dtype=dtype
    )
    assert is_constant(rewards_PN, 0.1).tolist() == [True, True, False, False]
    assert is_constant(rewards_PN, 0.0).tolist() == is_constant(rewards_PN).tolist() == [False] * 4
    for when in ("after", "before"):
        values_PM = advantages(rewards_PN, everything(rewards_PN), when=when, tolerance=0.1)
        assert (values_PM != 0).any(dim=1).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("tolerance", "error"), [(-0.1, ValueError), (NAN, ValueError), ("0.1", TypeError)])
def test_a_tolerance_is_a_number_of_at_least_0(tolerance, error) -> None:
    with pytest.raises(error, match="tolerance"):
        is_constant(torch.rand(1, 2), tolerance)
    with pytest.raises(error, match="tolerance"):
        select_batch(torch.rand(1, 2), 2, tolerance=tolerance)


def test_unscored_rollouts_are_no_part_of_a_constant_group() -> None:
    rewards_PN = torch.tensor([[NAN, 0.3, 0.3], [NAN, NAN, NAN], [NAN, 0.3, 0.4], [NAN, NAN, 1.0]])
    assert is_constant(rewards_PN).tolist() == [True, True, False, True]
    assert is_constant(torch.tensor([[True, True], [True, False]])).tolist() == [True, False]
