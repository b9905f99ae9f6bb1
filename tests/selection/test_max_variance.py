"""max_variance against brute force and against its stated tie rule, in exact arithmetic."""

import math
from fractions import Fraction
from itertools import accumulate, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_rl.selection.rules import max_variance

pytestmark = pytest.mark.numeric

NAN = math.nan
SIZES = [(n, m) for n in range(1, 13) for m in range(1, n + 1)]


def stated_rule(rewards: list[float], m: int) -> list[int]:
    """The rule as its docstring states it, for one group, in exact arithmetic."""
    scored = sorted(Fraction(r) for r in rewards if not math.isnan(r))
    unscored = [i for i, r in enumerate(rewards) if math.isnan(r)]
    if len(scored) <= m:
        return sorted([i for i in range(len(rewards)) if i not in unscored] + unscored[: m - len(scored)])

    sums = list(accumulate(scored, initial=Fraction(0)))
    squares = list(accumulate((value * value for value in scored), initial=Fraction(0)))

    def spread(k: int) -> Fraction:
        """Return m^2 times the variance of the m - k lowest and the k highest rewards."""
        low, high = m - k, len(scored) - k
        total = sums[low] + sums[-1] - sums[high]
        total_of_squares = squares[low] + squares[-1] - squares[high]
        return m * total_of_squares - total**2

    spreads = [spread(k) for k in range(m + 1)]
    best = [k for k in range(m + 1) if spreads[k] == max(spreads)]
    k = min(best, key=lambda k: (abs(2 * k - m), -k))
    wanted = scored[: m - k] + scored[len(scored) - k :]
    kept = []
    for value in set(wanted):
        same = [i for i, r in enumerate(rewards) if r == value]
        kept += same[: wanted.count(value)]
    return sorted(kept)


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_no_subset_has_a_larger_variance(n: int, m: int) -> None:
    generator = torch.Generator().manual_seed(100 * n + m)
    rewards_PN = torch.cat(
        [
            torch.randn(12, n, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (6, n), generator=generator).double(),
            torch.randint(-1, 3, (12, n), generator=generator).double() / 4,
            torch.randn(6, n, generator=generator, dtype=torch.float64).exp() - 5,
        ]
    )
    indices_PM = max_variance(rewards_PN, m)
    subsets_SM = torch.tensor(list(combinations(range(n), m)))
    best_P = rewards_PN[:, subsets_SM].var(dim=2, correction=0).amax(dim=1)
    kept_P = rewards_PN.gather(1, indices_PM).var(dim=1, correction=0)
    torch.testing.assert_close(kept_P, best_P, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [*SIZES, (200, 15), (200, 100)])  # long runs of equal values too
def test_ties_are_broken_as_stated(n: int, m: int) -> None:
    generator = torch.Generator().manual_seed(n * 100 + m)
    rewards_PN = torch.randint(-1, 3, (20, n), generator=generator).double()
    rewards_PN[:4] = (rewards_PN[:4] > 0).double()
    rewards_PN[4:8] *= -1  # zeros of both signs are equal
    rewards_PN[10:15].masked_fill_(torch.rand(5, n, generator=generator) < 0.3, NAN)
    assert max_variance(rewards_PN, m).tolist() == [stated_rule(row, m) for row in rewards_PN.tolist()]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], int]:
    reward = st.integers(-40, 40).map(float) | st.sampled_from([0.0, 1.0])
    rewards = draw(st.lists(reward | st.just(NAN), min_size=1, max_size=24))
    return rewards, draw(st.integers(1, len(rewards)))


def kept(rewards: list[float], m: int) -> list[int]:
    return max_variance(torch.tensor([rewards], dtype=torch.float64), m)[0].tolist()


@given(groups(), st.integers(-(10**6), 10**6), st.integers(-40, 40), st.sampled_from([1, 3, 10]))
@settings(max_examples=50)
def test_shift_and_scale_do_not_matter(group, shift: int, exponent: int, factor: int) -> None:
    rewards, m = group
    assert kept([factor * 2.0**exponent * (r + shift) for r in rewards], m) == kept(rewards, m)


@given(st.integers(1, 8), st.integers(0, 2**32), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.booleans())
@settings(max_examples=50)
def test_two_frequent_rewards_are_kept_half_and_half(half: int, seed: int, low: float, gap: float, odd: bool) -> None:
    """For any two values, however they round; an odd m keeps one more of the higher."""
    m = 2 * half + odd
    generator = torch.Generator().manual_seed(seed)
    right_N = torch.randperm(4 * m, generator=generator) < torch.randint(half + 1, 3 * m, (), generator=generator)
    rewards_N = torch.where(right_N, low + gap, low).double()
    expected = sorted(right_N.nonzero()[: half + odd, 0].tolist() + (~right_N).nonzero()[:half, 0].tolist())
    assert kept(rewards_N.tolist(), m) == expected


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e38), (torch.float64, 1e300), (torch.float64, 1.7e308)])
def test_huge_rewards_do_not_overflow(dtype: torch.dtype, huge: float) -> None:
    shape_PN = torch.tensor([[0.0, 1.0, -1.0, 0.25, -0.5, 0.5], [-1.0, -1.0, 1.0, -1.0, 0.9, -0.9]], dtype=dtype)
    assert torch.equal(max_variance(shape_PN * huge, 3), max_variance(shape_PN, 3))


def test_a_large_offset_does_not_hide_the_spread() -> None:
    spread = torch.tensor([[0.0, 3.0, 1.0, 2.0, 3.0, 0.0]], dtype=torch.float64)
    assert torch.equal(max_variance(spread + 1e15, 4), max_variance(spread, 4))
