"""Places of dead groups: who gets them, with which rows and weights, and which further prompts come."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pods_rl.rollouts.allocating import (
    Refill,
    distinct_first,
    keep_ends,
    live,
    row_weights,
    rows_auto,
    select_rows,
    share_rows,
    sides,
)
from pods_rl.selection import advantages, select
from pods_rl.selection.rules import max_variance

NAN = math.nan


def groups(rights: list[int], n: int) -> Tensor:
    """A group with so many rewards of 1, each, the rest 0."""
    return (torch.arange(n) < torch.tensor(rights).unsqueeze(1)).float()


def test_a_group_without_spread_among_its_scored_rewards_is_dead() -> None:
    rewards = torch.tensor([[0.0, 1, NAN], [1, 1, NAN], [NAN, NAN, NAN], [NAN, 2, NAN], [0.1, 0.2, 0.1]])
    assert live(rewards).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("rights", "m", "rows"),
    [
        ([8, 0, 8, 16], 4, [8, 0, 8, 0]),
        ([8, 8, 8, 0], 4, [6, 6, 4, 0]),  # two pairs for three groups: the first two
        ([3, 16, 8, 0], 4, [6, 0, 10, 0]),  # at most 2 x 3 rows of the first
        ([2, 16, 1, 0], 4, [4, 4, 4, 4]),  # none can use more than m
        ([3, 16, 0, 0], 4, [6, 4, 4, 2]),  # dead groups keep the rest, the first of them most
        ([8, 0], 3, [5, 1]),  # pairs: one place of an odd three stays
        ([8, 8], 4, [4, 4]),
        ([0, 16], 4, [4, 4]),
        ([], 4, []),
    ],
)
def test_places_of_dead_groups_go_to_live_ones_in_pairs(rights: list[int], m: int, rows: list[int]) -> None:
    rewards = groups(rights, 16) if rights else torch.zeros(0, 16)
    assert share_rows(rewards, m).tolist() == rows


def shared_one_by_one(rewards_PN: Tensor, m: int) -> list[int]:
    """The stated rule, a pair at a time."""
    low_P, high_P = (side.tolist() for side in sides(rewards_PN))
    alive = live(rewards_PN).tolist()
    rows, places = [m if a else 0 for a in alive], alive.count(False) * m
    while True:
        able = [p for p, a in enumerate(alive) if a and rows[p] + 2 <= 2 * min(low_P[p], high_P[p])]
        if not able or places < 2:
            break
        first = min(able, key=lambda p: (rows[p], p))
        rows[first], places = rows[first] + 2, places - 2
    for p, a in enumerate(alive):
        if not a:
            rows[p] = min(m, places)
            places -= rows[p]
    return rows


def test_sharing_is_that_of_one_pair_at_a_time_and_uses_every_place() -> None:
    generator = torch.Generator().manual_seed(0)
    shared = 0
    for trial in range(300):
        P, n, m = 1 + trial % 9, 4 + trial % 13, 1 + trial % 4
        rates_P1 = torch.rand(P, 1, generator=generator) * (torch.rand(P, 1, generator=generator) < 0.6)
        rewards_PN = (torch.rand(P, n, generator=generator) < rates_P1).double()
        if trial % 3 == 0:
            rewards_PN = rewards_PN * torch.randint(1, 4, (P, n), generator=generator)
            rewards_PN[0, 0] = NAN
        rows_P = share_rows(rewards_PN, m)
        assert rows_P.tolist() == shared_one_by_one(rewards_PN, m)
        assert rows_P.sum() == P * m
        shared += bool((rows_P > m).any())
    assert shared > 50


def test_graded_rewards_are_split_at_the_middle_of_the_groups_range() -> None:
    low_P, high_P = sides(torch.tensor([[0.0, 0.1, 1.0, 1.1, 0.55], [3, 3, 3, 3, 3], [NAN, -4, 2, -1, -1.5]]))
    assert low_P.tolist() == [2, 0, 2]
    assert high_P.tolist() == [2, 0, 1]


def test_weights_give_each_prompt_its_part_of_a_mean_over_rows() -> None:
    rewards = groups([8, 0, 3, 16], 16)
    rows_P = share_rows(rewards, 4)
    rows = select_rows(rewards, rows_P)
    assert [len(indices) for indices in rows] == rows_P.tolist()
    parts = [len(indices) * weight for indices, weight in zip(rows, row_weights(rows_P, 4).tolist(), strict=True)]
    assert [part for part, count in zip(parts, rows_P.tolist(), strict=True) if count] == pytest.approx(
        [4.0] * int((rows_P > 0).sum())
    )


def test_each_group_keeps_what_the_rule_keeps_of_as_many() -> None:
    rewards = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    rows_P = torch.tensor([4, 6, 4, 0, 12])
    for group, (rows, kept) in enumerate(zip(rows_P.tolist(), select_rows(rewards, rows_P), strict=True)):
        assert kept.tolist() == (max_variance(rewards[group : group + 1], rows)[0].tolist() if rows else [])


@pytest.mark.parametrize(
    ("right", "m", "multiple", "rows", "high"),
    [
        (3, 16, 1.0, 6, 3),
        (3, 16, 2.0, 9, 3),
        (3, 16, 1.5, 7, 3),  # round(4.5) = 4, to even
        (13, 16, 2.0, 9, 6),  # three wrong: six right
        (8, 16, 1.0, 16, 8),
        (4, 6, 2.0, 6, 2),
        (8, 5, 1.0, 4, 2),
        (1, 1, 5.0, 1, 1),
        (8, 16, 2.0, 16, 8),  # all there are
        (1, 16, 30.0, 16, 1),  # cut at m
        (3, 16, 0.0, 3, 3),
        (0, 16, 1.0, 0, 0),
        (16, 16, 1.0, 0, 0),
        (15, 15, 100.0, 15, 14),  # no more than there are: 16 rollouts, one of them wrong
    ],
)
def test_rows_follow_the_rarer_reward(right: int, m: int, multiple: float, rows: int, high: int) -> None:
    rewards = groups([right], 16)
    rows_P, k_P = rows_auto(rewards, m, multiple)
    assert (rows_P.tolist(), k_P.tolist()) == ([rows], [high])
    kept = keep_ends(rewards, rows_P, k_P)
    assert int(kept.sum()) == rows
    assert int((kept & (rewards == 1)).sum()) == high


def test_ends_are_those_of_the_rule_with_its_ties() -> None:
    rewards = torch.tensor([[0.5, 0, 1, NAN, 1, 0, 0, 1, 0.5, 0]]).repeat(2, 1)
    assert keep_ends(rewards, torch.tensor([4, 3]), torch.tensor([2, 0])).nonzero()[:, 1].tolist() == [
        1,
        2,
        4,
        5,
        1,
        5,
        6,
    ]
    assert max_variance(rewards[:1], 4).tolist() == [[1, 2, 4, 5]]


def test_rows_left_out_as_unscored_leave_the_advantages_of_the_others() -> None:
    rewards = groups([3], 8).double()
    kept = select(rewards, 8)
    alone = rewards.masked_fill(~keep_ends(rewards, *rows_auto(rewards, 8, 1.0)), NAN)
    assert advantages(alone, kept)[0].sign().tolist() == [1, 1, 1, -1, -1, -1, 0, 0]


def test_texts_new_to_a_group_come_first_among_equal_rewards() -> None:
    rewards = torch.tensor([[1.0, 1, 1, 0, 0, 0, 1, 0]])
    labels = torch.tensor([[9, 9, 4, 3, 3, 3, 9, 7]])
    order = distinct_first(labels)
    kept = order.gather(1, max_variance(rewards.gather(1, order), 4)).sort(dim=1).values
    assert kept.tolist() == [[0, 2, 3, 7]]
    assert max_variance(rewards, 4).tolist() == [[0, 1, 3, 4]]
    many = torch.randint(0, 5, (40, 12), generator=torch.Generator().manual_seed(0))
    for row, found in zip(many.tolist(), distinct_first(many).tolist(), strict=True):
        assert found == sorted(range(12), key=lambda i: (row[:i].count(row[i]), i))


def test_a_refill_continues_from_its_number_and_gives_each_prompt_once_a_pass() -> None:
    whole = Refill(seed=5, size=7).prompts(21)
    assert [sorted(whole[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert whole[:7] != whole[7:14]
    piecewise = Refill(seed=5, size=7)
    found = [prompt for count in (1, 0, 9, 4, 7) for prompt in piecewise.prompts(count)]
    assert found == whole
    assert piecewise.drawn == 21
    assert Refill(seed=5, size=7, drawn=10).prompts(11) == whole[10:]
    assert Refill(seed=6, size=7).prompts(21) != whole
