"""The over-long penalty, against DAPO's equation 13, and thresholds."""

from __future__ import annotations

import math

import pytest

from pods_rl.errors import UserError
from pods_rl.rewards import REWARDS, Reward, binarise, overlong


def test_worked_values_of_dapo():
    # 16384 expected tokens, 4096 of buffer
    values = {1: 0.0, 16384: 0.0, 17408: -0.25, 18432: -0.5, 20480: -1.0, 20481: -1.0, 10**9: -1.0}
    assert {tokens: overlong(tokens, 20480, 4096) for tokens in values} == values
    assert [overlong(tokens, 20480) for tokens in values] == list(values.values())  # a fifth of the limit


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 512])
def test_it_falls_evenly_from_zero_to_minus_one(limit):
    scores = [overlong(tokens, limit) for tokens in range(limit + 1)]
    assert scores == sorted(scores, reverse=True)
    assert (scores[0], scores[-1]) == (0.0, -1.0)
    assert scores[limit - max(1, limit // 5)] == 0.0


def test_a_buffer_beyond_the_limit_is_cut_to_it():
    assert [overlong(tokens, 10, 99) for tokens in (0, 5, 10)] == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(("limit", "buffer"), [(0, None), (-1, None), (0, 5), (10, 0), (10, -3)])
def test_impossible_limits_are_refused(limit, buffer):
    with pytest.raises(ValueError, match=f"of at least 1 token: got {limit} and "):
        overlong(5, limit, buffer)


def test_full_marks_of_every_reward_stay_full_marks():
    for reward in REWARDS.values():
        low, high = reward.range
        assert binarise(reward, [low, (low + high) / 2, high], 1.0) == [0.0, 0.0, 1.0]
        assert binarise(reward, [low, (low + high) / 2, high], 0.5) == [0.0, 1.0, 1.0]
        assert binarise(reward, [low, high], 1e-6) == [0.0, 1.0]


def test_shares_that_are_not_exact_in_binary():
    reward = Reward("own", lambda text, gold: 0.0, range=(-0.3, 0.0))
    assert -0.3 + 0.9 * 0.3 > -0.03  # a hair too much to ask
    assert binarise(reward, [-0.03, -0.031], 0.9) == [1.0, 0.0]


def test_what_nobody_could_score_stays_so():
    assert math.isnan(binarise(REWARDS["format"], [math.nan], 0.5)[0])


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, math.nan])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ValueError, match="expected a share of the reward's range"):
        binarise(REWARDS["format"], [0.5], share)


def test_an_unknown_range_is_refused():
    with pytest.raises(UserError, match=r"'own' has none: set the function's attribute range"):
        binarise(Reward("own", lambda text, gold: 0.0), [0.5], 0.5)
