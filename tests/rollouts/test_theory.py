"""What stopping does to the expected gradient, by enumeration of every group of a small policy (docs/rollouts.md)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pods_rl.rollouts.allocating import distinct_first
from pods_rl.rollouts.stopping import Status, Stopping, wave_sizes
from pods_rl.selection.rules import max_variance

from .test_stopping import kept_when_stopped

pytestmark = pytest.mark.numeric

POLICY = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64)  # of four texts
REWARDS = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
GRADED = torch.tensor([1.0, 1.0, 0.0, 0.4], dtype=torch.float64)
SCORES = torch.eye(4, dtype=torch.float64) - POLICY  # the gradient of each text's log-probability by the logits


def every_group(n: int) -> tuple[Tensor, Tensor]:
    """Every sequence of n texts `[C, N]`, and its probability `[C]`."""
    texts_CN = torch.cartesian_prod(*[torch.arange(4)] * n)
    return texts_CN, POLICY[texts_CN].prod(dim=1)


def kept_texts(texts_CN: Tensor, rewards_CN: Tensor, stopping: Stopping, waves: list[int]) -> Tensor:
    schedule = wave_sizes(waves, stopping.n, stopping.m)
    generated_C, _ = stopping.replay(rewards_CN, schedule)
    return texts_CN.gather(1, kept_when_stopped(rewards_CN, generated_C, stopping.m))


def worst_difference(kept_CM: Tensor, rewards_CN: Tensor, chance_C: Tensor, reward_of: Tensor) -> float:
    """How far the kept texts are, given the rewards of the group, from independent draws given their own rewards."""
    _, pattern_C = rewards_CN.unique(dim=0, return_inverse=True)
    same = (reward_of.unsqueeze(1) == reward_of).double() * POLICY
    of_reward = same / same.sum(dim=1, keepdim=True)  # of each text: the law of those with its reward
    worst = 0.0
    for i, j in ((0, 0), (0, 1), (1, 1)):  # each one's law, and that of a pair
        found = torch.zeros(int(pattern_C.max()) + 1, 16, dtype=torch.float64)
        found.view(-1).index_add_(0, pattern_C * 16 + kept_CM[:, i] * 4 + kept_CM[:, j], chance_C)
        pair = of_reward[kept_CM[:, i]].unsqueeze(2) * of_reward[kept_CM[:, j]].unsqueeze(1)
        pair = torch.diag_embed(of_reward[kept_CM[:, i]]) if i == j else pair
        expected = torch.zeros_like(found).index_add_(0, pattern_C, pair.flatten(1) * chance_C.unsqueeze(1))
        worst = max(worst, (found - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("reward_of", [REWARDS, GRADED], ids=["binary", "graded"])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_t1_kept_texts_are_independent_draws_given_the_rewards(reward_of: Tensor, share: float) -> None:
    texts_CN, chance_C = every_group(6)
    rewards_CN = reward_of[texts_CN]
    kept_CM = kept_texts(texts_CN, rewards_CN, Stopping(2, 6, share, 0.0, 1.0, give_up_after=3), [2, 1])
    assert worst_difference(kept_CM, rewards_CN, chance_C, reward_of) < 1e-14


def test_t1_is_lost_by_finishing_order_and_by_a_preference_for_distinct_texts() -> None:
    texts_CN, chance_C = every_group(6)
    first_CN = texts_CN.sort(dim=1).values  # text 0 is the shortest
    rewards_CN, stopping = REWARDS[first_CN], Stopping(2, 6, 1.0, 0.0, 1.0)
    kept_CM = kept_texts(first_CN, rewards_CN, stopping, [2, 1])
    assert worst_difference(kept_CM, REWARDS[texts_CN], chance_C, REWARDS) > 0.01
    distinct_CN = texts_CN.gather(1, distinct_first(texts_CN))
    kept_CM = distinct_CN.gather(1, max_variance(REWARDS[distinct_CN], 4))
    assert worst_difference(kept_CM, REWARDS[texts_CN], chance_C, REWARDS) > 0.005


def gradients(kept_CM: Tensor) -> Tensor:
    """The mean of advantage times score, `[C, 4]`; advantages over the kept, in standard deviations of the kept."""
    rewards_CM = REWARDS[kept_CM]
    centred_CM = rewards_CM - rewards_CM.mean(dim=1, keepdim=True)
    deviation_C1 = rewards_CM.std(dim=1, correction=0, keepdim=True)
    return ((centred_CM / deviation_C1.clamp(min=1e-9)).unsqueeze(2) * SCORES[kept_CM]).mean(dim=1)


@pytest.mark.parametrize("give_up_after", [None, 4])
def test_t2_the_direction_is_that_of_the_pass_rate_and_only_its_length_changes(give_up_after: int | None) -> None:
    m, n = 4, 7
    texts_CN, chance_C = every_group(n)
    kept_CM = kept_texts(texts_CN, REWARDS[texts_CN], Stopping(m, n, 1.0, 0.0, 1.0, give_up_after), [4, 1])
    right_C = REWARDS[kept_CM].sum(dim=1)
    p = (POLICY * REWARDS).sum()
    slope = (POLICY * REWARDS) @ SCORES  # of the pass rate, by the logits
    for right in range(m + 1):
        mean = (chance_C * (right_C == right)) @ gradients(kept_CM) / chance_C[right_C == right].sum()
        torch.testing.assert_close(mean, math.sqrt(right * (m - right)) / m * slope / (p * (1 - p)), rtol=0, atol=1e-12)


def test_the_roulette_keeps_the_expected_gradient_and_giving_up_without_it_does_not() -> None:
    m, n = 2, 6
    texts_CN, chance_C = every_group(n)
    rewards_CN = REWARDS[texts_CN]
    fixed = chance_C @ gradients(texts_CN.gather(1, max_variance(rewards_CN, m)))
    roulette = Stopping(m, n, 1.0, 0.0, 1.0, give_up_after=3, give_up_probability=0.6)

    def expected(stopping: Stopping) -> Tensor:
        mean = torch.zeros(4, dtype=torch.float64)
        for draw, chance in ((0.0, 0.6), (0.99, 0.4)):  # below the probability, and not
            draws_C = torch.full((len(texts_CN),), draw)
            generated_C, _ = stopping.replay(rewards_CN, (2, 1, 1, 1, 1), draws_C)
            kept_CM = texts_CN.gather(1, kept_when_stopped(rewards_CN, generated_C, m))
            weights_C = stopping.weights(rewards_CN, draws_C)
            mean += chance * ((chance_C * weights_C) @ gradients(kept_CM))
        return mean

    torch.testing.assert_close(expected(roulette), fixed, rtol=0, atol=1e-12)
    always = expected(replace(roulette, give_up_probability=1.0))
    assert always.norm() < 0.9 * fixed.norm()
    torch.testing.assert_close(always / always.norm(), fixed / fixed.norm(), rtol=0, atol=1e-12)


def kept_length_ratio(*, by_number: bool) -> float:
    """The mean length of kept rollouts over that of all, of groups that stop when decided."""
    generator = torch.Generator().manual_seed(0)
    groups, n, m = 6000, 64, 16
    lengths_PN = torch.empty(groups, n).exponential_(generator=generator)
    rates_P1 = torch.rand(groups, 1, generator=generator) * 0.6 + 0.2
    rewards_PN = (torch.rand(groups, n, generator=generator) < rates_P1).float()  # whatever the length
    if not by_number:
        lengths_PN, order_PN = lengths_PN.sort(dim=1)
        rewards_PN = rewards_PN.gather(1, order_PN)
    generated_P, status_P = Stopping(m, n, low=0.0, high=1.0).replay(rewards_PN, wave_sizes([16, 4], n, m))
    assert (status_P == Status.DECIDED).float().mean() > 0.9
    return lengths_PN.gather(1, kept_when_stopped(rewards_PN, generated_P, m)).mean().item()  # their mean is 1


def test_lengths_stay_those_of_the_policy_only_if_rollouts_are_committed_by_number() -> None:
    assert kept_length_ratio(by_number=True) == pytest.approx(1, abs=0.02)
    assert kept_length_ratio(by_number=False) < 0.6


def test_waves_generate_at_most_0_6_of_64_at_the_same_selected_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    n, m, ratios = 64, 16, []
    for rate in torch.linspace(0.2, 0.8, 7).tolist():
        rewards_PN = (torch.rand(1500, n, generator=generator) < rate).float()
        generated_P, _ = Stopping(m, n, low=0.0, high=1.0).replay(rewards_PN, wave_sizes([16, 8], n, m))
        kept_PM = rewards_PN.gather(1, kept_when_stopped(rewards_PN, generated_P, m))
        whole_PM = rewards_PN.gather(1, max_variance(rewards_PN, m))
        assert torch.equal(kept_PM.sum(dim=1), whole_PM.sum(dim=1))
        ratios.append(generated_P.double().mean().item() / n)
    assert sum(ratios) / len(ratios) < 0.6
