"""Stopping a group: the same rollouts as the full n, the greatest variance still possible, waves and errors."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from pods_rl.errors import UserError
from pods_rl.rollouts.stopping import Status, Stopping, greatest_variance, roulette_draws, wave_end, wave_sizes
from pods_rl.selection.rules import max_variance

NAN = math.nan
LAYOUTS = ((16, 64, [16, 8]), (7, 64, [16, 8]), (15, 40, [15, 3, 9]), (1, 9, [1]), (2, 16, [4, 1]), (3, 24, [5]))


def kept_when_stopped(rewards_PN: Tensor, generated_P: Tensor, m: int) -> Tensor:
    """The rule's choice for each group among those generated."""
    kept_PM = torch.empty(len(rewards_PN), m, dtype=torch.int64)
    for end in generated_P.unique().tolist():
        groups = generated_P == end
        kept_PM[groups] = max_variance(rewards_PN[groups, :end], m)
    return kept_PM


def random_groups(kind: str, count: int, n: int, generator: torch.Generator) -> tuple[Tensor, float, float]:
    """Groups of all pass rates and their reward range; some rewards are unscored."""
    rate_P1 = torch.rand(count, 1, generator=generator)
    right_PN = torch.rand(count, n, generator=generator) < rate_P1
    other_PN = torch.rand(count, n, generator=generator)
    if kind == "binary":
        rewards, low, high = right_PN.double(), 0.0, 1.0
    elif kind == "sums":  # in float32, added up as a trainer does
        rewards, low, high = right_PN.float() + torch.tensor(0.1) * (other_PN < 0.9), 0.0, 1.1
    else:  # continuous, with many at the ends
        rewards, low, high = (other_PN * 4 - 2).clamp(-1, 1).where(right_PN, torch.tensor(-1.0)), -1.0, 1.0
    unscored = torch.rand(count, n, generator=generator) < 0.1 * (torch.rand(count, 1, generator=generator) < 0.3)
    return rewards.masked_fill(unscored, NAN), low, high


@pytest.mark.parametrize("kind", ["binary", "sums", "continuous"])
def test_a_lossless_stop_keeps_the_rollouts_of_the_full_n_in_20000_groups(kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    stopped = groups = 0
    for m, n, waves in LAYOUTS:
        rewards_PN, low, high = random_groups(kind, 1112, n, generator)
        schedule = wave_sizes(waves, n, m)
        generated_P, status_P = Stopping(m, n, low=low, high=high).replay(rewards_PN, schedule)
        assert ((status_P == Status.DECIDED) == (generated_P < n)).all()
        kept_PM = kept_when_stopped(rewards_PN, generated_P, m)
        later_PN = torch.arange(n) >= generated_P.unsqueeze(1)
        for rest in (rewards_PN, rewards_PN * 0 + low, rewards_PN * 0 + high, rewards_PN.flip(0)):
            mismatches = (max_variance(torch.where(later_PN, rest, rewards_PN), m) != kept_PM).any(dim=1)
            assert mismatches.sum() == 0
        stopped, groups = stopped + int((generated_P < n).sum()), groups + len(rewards_PN)
    assert groups * 3 > 20_000
    assert stopped > groups / 5


def test_odd_m_needs_one_more_right_than_wrong() -> None:
    """T3: at least ceil(m / 2) right and floor(m / 2) wrong, since the rule breaks the tie towards high rewards."""
    stopping = Stopping(m=3, n=8, low=0.0, high=1.0)
    assert stopping.statuses(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1], [1, 0, 1, 0]])).tolist() == [0, 1, 1]
    assert max_variance(torch.tensor([[1.0, 0, 0, 0]]), 3).tolist() == [[0, 1, 2]]
    assert max_variance(torch.tensor([[1.0, 0, 0, 0, 1]]), 3).tolist() == [[0, 1, 4]]  # so it was open
    one = Stopping(m=1, n=4, share=0.5, low=0.0, high=1.0)
    assert one.statuses(torch.tensor([[0.0, 0.9], [0.0, 1.0]])).tolist() == [0, 1]


def completed(rewards_T: list[float], m: int, left: int, grid: tuple[float, ...]) -> list[float]:
    """The best variance of m rewards for every completion of a group by rewards of a grid."""
    every_CN = torch.tensor([rewards_T + list(rest) for rest in product(grid, repeat=left)], dtype=torch.float64)
    every_CN = every_CN[:, ~every_CN.isnan().any(dim=0)]
    subsets = torch.tensor(list(combinations(range(every_CN.shape[1]), m)))
    return every_CN[:, subsets].var(dim=2, correction=0).amax(dim=1).tolist()


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_no_completion_has_a_greater_variance_than_the_bound_and_one_at_the_ends_reaches_it(m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    for left in (1, 2, 3, 4):
        rewards_PT = torch.randint(-4, 5, (8, max(m, 4)), generator=generator).double() / 4
        rewards_PT[6:, 0] = NAN if rewards_PT.shape[1] > m else 0.25
        for row, bound in zip(rewards_PT.tolist(), greatest_variance(rewards_PT, m, left).tolist(), strict=True):
            assert max(completed(row, m, left, (-1.0, -0.5, 0.0, 0.3, 1.0))) == pytest.approx(bound, abs=1e-12)
            assert max(completed(row, m, left, (-1.0, 1.0))) == pytest.approx(bound, abs=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 0.999])
def test_a_decided_group_has_the_certified_share_on_every_path(share: float) -> None:
    generator = torch.Generator().manual_seed(7)
    decided = undecided = 0
    for m, left in ((4, 3), (3, 4), (2, 5)):
        n = 8
        rewards_PT = torch.randint(0, 9, (40, n - left), generator=generator).double() / 4 - 0.5
        status_P = Stopping(m, n, share, low=-0.5, high=1.5).statuses(rewards_PT)
        now_P = rewards_PT.gather(1, max_variance(rewards_PT, m)).var(dim=1, correction=0)
        for row, status, now in zip(rewards_PT.tolist(), status_P.tolist(), now_P.tolist(), strict=True):
            worst = max(completed(row, m, left, (-0.5, 0.1, 1.5)))
            assert (status == Status.DECIDED) == (now >= share * worst * (1 - 1e-9))
            decided, undecided = decided + (status == Status.DECIDED), undecided + (status == Status.OPEN)
    assert undecided
    assert decided or share > 0.9


def test_a_share_reached_exactly_decides() -> None:
    """4 of 16 right give 0.75 of the variance of 8 of 16."""
    rewards = torch.tensor([[1.0] * 4 + [0.0] * 20, [1.0] * 3 + [0.0] * 21])
    assert Stopping(16, 64, 0.75, 0.0, 1.0).statuses(rewards).tolist() == [1, 0]
    assert Stopping(16, 64, 0.75, -0.3, 0.4).statuses(rewards.float() * 0.7 - 0.3).tolist() == [1, 0]


def test_unscored_rollouts_count_towards_nothing() -> None:
    stopping = Stopping(m=4, n=8, share=0.1, low=0.0, high=1.0, give_up_after=4)
    rewards = torch.tensor([[0.0, 1, NAN, NAN, NAN], [1, 1, NAN, 1, 1], [0, NAN, 1, 1, 1], [NAN] * 5])
    assert stopping.statuses(rewards).tolist() == [0, 2, 1, 2]


def test_without_a_range_groups_are_given_up_and_never_decided() -> None:
    rewards = torch.tensor([[0.0, 1, 0, 1, 0, 1], [2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 3]])
    assert Stopping(4, 8, give_up_after=6).statuses(rewards).tolist() == [0, 2, 0]
    assert Stopping(4, 8, give_up_after=7).statuses(rewards).tolist() == [0, 0, 0]
    assert Stopping(4, 8).statuses(rewards).tolist() == [0, 0, 0]
    assert Stopping(4, 6).statuses(rewards).tolist() == [3, 3, 3]
    assert Stopping(8, 16, low=0.0, high=3.0).statuses(rewards).tolist() == [0, 0, 0]  # fewer than m


def test_totals_that_differ_from_the_range_by_rounding_are_at_its_end() -> None:
    one, tenth = torch.tensor(1.0), torch.tensor(0.1)
    total = one + tenth + tenth + tenth  # in float32 not the number nearest to 1.3
    rewards = torch.stack([total, total, torch.tensor(0.0), torch.tensor(0.0)]).unsqueeze(0)
    assert Stopping(4, 8, low=0.0, high=1.3).statuses(rewards).tolist() == [1]
    assert Stopping(4, 8, low=0.0, high=1.30001).statuses(rewards).tolist() == [0]


def test_a_reward_outside_the_range_is_an_error() -> None:
    with pytest.raises(UserError, match=r"got a reward of 1.1 and the range \[0, 1\]"):
        Stopping(2, 4, low=0.0, high=1.0).statuses(torch.tensor([[0.0, 1.1]]))


def test_the_roulette_is_decided_once_for_each_group() -> None:
    stopping = Stopping(m=2, n=8, low=0.0, high=1.0, give_up_after=3, give_up_probability=0.4)
    rewards_PN = torch.tensor([[0.0] * 8] * 3 + [[0, 1, 0, 1, 0, 1, 0, 1]])
    draws = torch.tensor([0.39, 0.41, 0.9, 0.0])
    assert stopping.replay(rewards_PN, (3, 1, 4), draws)[0].tolist() == [3, 8, 8, 3]
    assert stopping.replay(rewards_PN, (3, 1, 4), draws)[1].tolist() == [2, 3, 3, 1]
    for end in range(3, 9):
        assert stopping.weights(rewards_PN[:, :end], draws).tolist() == pytest.approx([1, 1 / 0.6, 1 / 0.6, 1])
    assert stopping.weights(rewards_PN[:, :2], draws).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="one draw for each group"):
        stopping.statuses(rewards_PN[:, :3])


def test_roulette_draws_depend_on_the_prompt_alone() -> None:
    draws = roulette_draws((3, 1), [5, 6, 7])
    assert torch.equal(draws[[2, 0]], roulette_draws((3, 1), [7, 5]))
    assert not torch.equal(draws, roulette_draws((3, 2), [5, 6, 7]))
    many = roulette_draws((0, 0), range(2000))
    assert 0.47 < many.mean() < 0.53
    assert 0 <= many.min() < many.max() < 1


def test_waves_add_up_to_n() -> None:
    assert wave_sizes([16], 64, 16) == (16, 16, 16, 16)
    assert wave_sizes([100], 64, 16) == (64,)
    assert wave_sizes([4, 1, 2], 8, 4) == (4, 1, 2, 1)
    assert [wave_end((4, 1, 2, 1), count) for count in (1, 4, 5, 6, 8)] == [4, 4, 5, 7, 8]


@pytest.mark.parametrize(
    ("waves", "message"),
    [
        ([], "whole numbers of at least 1"),
        ([16, 0], "whole numbers of at least 1"),
        ([16, 8.0], "whole numbers of at least 1"),
        ([8, 8], "got 8 and 16. Set it to 16 or more"),
    ],
)
def test_waves_that_cannot_be(waves: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wave_sizes(waves, 64, 16)


@pytest.mark.parametrize(
    "given",
    [
        {"share": 0.0},
        {"share": 1.1},
        {"low": 0.0},
        {"low": 1.0, "high": 1.0},
        {"low": 0.0, "high": math.inf},
        {"low": NAN, "high": 1.0},
        {"give_up_after": 15},
        {"give_up_after": 65},
        {"give_up_probability": 0.0},
    ],
)
def test_settings_that_cannot_be(given: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"stop_variance|reward_range|give_up"):
        Stopping(16, 64, **given)
