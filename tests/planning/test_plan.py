"""A plan's prices, simulated signal and choice, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pods_rl.planning.plan import NO_INFORMATION, decide
from pods_rl.planning.prices import Prices, Setting, Step, StepWork, fit_prices
from pods_rl.planning.signal import Pool, simulate


def pool_of(*rates: float, rollouts: int = 4000) -> Pool:
    """Prompts whose pass rates are known almost exactly."""
    return Pool([[float(i < rate * rollouts) for i in range(rollouts)] for rate in rates])


def test_prices_are_recovered_from_steps_that_they_make() -> None:
    prices = Prices(step=0.4, prompt=0.02, rollout=0.005, row=0.01)
    rng, settings = np.random.default_rng(0), []
    for rollouts, prompts in ((16, 1), (64, 1), (64, 4)):
        works = [StepWork(prompts, rollouts, rng.integers(17)) for _ in range(5)]
        settings.append([Step(w, 0.3 + 0.02 * prompts + 0.005 * rollouts, 0.1 + 0.01 * w.rows) for w in works])
    found = fit_prices(settings)
    assert vars(found) == pytest.approx(vars(prices))
    assert found.seconds(settings[1][0].work) == pytest.approx(settings[1][0].seconds)


def test_no_price_is_below_0() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        steps = [Step(StepWork(*rng.integers(1, 9, size=3)), *rng.random(2)) for _ in range(8)]
        assert min(vars(fit_prices([steps])).values()) >= 0


@pytest.mark.parametrize(("n", "m", "rate"), [(16, 16, 0.5), (16, 16, 0.1), (64, 16, 0.1), (32, 8, 0.9)])
def test_signal_and_dead_groups_are_those_of_binomial_groups(n: int, m: int, rate: float) -> None:
    right = np.arange(n + 1)
    chance = np.array([math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1)])
    kept = right if n == m else np.clip(np.minimum(right, m // 2), m - (n - right), m)
    precision = kept * (m - kept) / m
    found = simulate(Setting(n, m), pool_of(rate), Prices(), m, steps=4000)
    assert found.signal == pytest.approx(float(chance @ np.sqrt(precision)), rel=0.05)
    assert found.dead == pytest.approx(float(chance @ (precision == 0)), abs=0.02)
    assert (found.work.prompts, found.work.rollouts) == (1, n)
    assert found.work.rows == pytest.approx(m * (1 - found.dead))


def test_the_signal_of_graded_rewards_is_rows_times_their_variance() -> None:
    found = simulate(Setting(8, 8), Pool([[0.0, 1.0, 3.0, 4.0] * 500]), Prices(), 800, steps=200)  # scaled to 0..1
    assert found.signal**2 == pytest.approx(100 * 7 * np.var([0.0, 0.25, 0.75, 1.0]), rel=0.05)


CHEAP = Prices(step=0.07, rollout=0.0001, row=0.004)
HARD = (0.02, 0.05, 0.1, 0.02, 0.05, 0.1)


def planned(pool: Pool, prices: Prices, spread: float = 0.0):
    simulated = partial(simulate, pool=pool, prices=prices, rows=16)
    found = [simulated(Setting(n, 16)) for n in (16, 64, 32)]
    times = [(one.modelled * (1 - spread), one.modelled * (1 + spread)) for one in found]
    found = [replace(one, times=time) for one, time in zip(found, times, strict=True)]
    return decide(found, pool, simulated, {"plan": "a test"})


def test_more_rollouts_are_recommended_where_they_are_cheap_and_prompts_are_hard() -> None:
    found = planned(pool_of(*HARD, rollouts=400), CHEAP)
    assert found.chosen.setting == Setting(64, 16)
    assert max(map(len, found.lines())) <= 80
    assert any(line.startswith("Recommended: 64 -> 16") for line in found.lines())


def test_the_cost_of_a_step_is_given_in_steps_of_grpo_and_against_break_even() -> None:
    prices = Prices(step=0.2, rollout=0.01)  # of 16, 32 and 64 rollouts: 0.36, 0.52 and 0.84 s
    text = planned(pool_of(*HARD), prices).step_costs()
    assert "64 -> 16 2.33 (above), 32 -> 16 1.44 (below) break-even" in text
    assert "64 -> 16 1.00 (below)" in planned(pool_of(*HARD), Prices(step=1.0)).step_costs()
    untimed = replace(planned(pool_of(*HARD), prices), candidates=())
    assert untimed.step_costs() == ""


@pytest.mark.parametrize(
    ("pool", "prices", "spread"),
    [
        (pool_of(0.5, 0.4, 0.6, rollouts=400), Prices(step=0.01, rollout=0.01, row=0.001), 0.0),  # rollouts cost much
        (Pool([[0.0] * 15 + [1.0], [0.0] * 8 + [1.0] * 8]), Prices(step=0.07, rollout=0.0004), 0.0),  # two prompts
        (pool_of(*HARD, rollouts=400), CHEAP, 0.9),  # times that differ from step to step
    ],
    ids=["dear", "few prompts", "noisy times"],
)
def test_grpo_is_kept_where_the_gain_is_not_certain(pool: Pool, prices: Prices, spread: float) -> None:
    assert planned(pool, prices, spread).chosen.setting == Setting(16, 16)


@pytest.mark.parametrize("groups", [[[1.0] * 8, [1.0] * 8], [[0.0] * 8], [[0.0], [1.0]], [[1.0, math.nan], [0.0]]])
def test_equal_rewards_of_each_prompt_are_no_information_whatever_they_are(groups) -> None:
    found = planned(Pool(groups), CHEAP)
    assert (found.reason, found.chosen) == (NO_INFORMATION, found.candidates[0])
