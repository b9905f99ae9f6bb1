"""A plan's prices, simulated signal and choice, against closed forms."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pods_rl.planning.plan import NO_INFORMATION, decide
from pods_rl.planning.prices import Prices, Setting, Step, StepWork, fit_prices
from pods_rl.planning.signal import MODEL, Model, Pool, simulate


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
    model = Model(between=2.0, exponent=1.5, error=0.0)
    found = simulate(Setting(n, m), pool_of(rate), Prices(), m, steps=4000, model=model)
    counted = 1 / (2 + 1 / np.maximum(precision, 1e-12))
    assert found.signal == pytest.approx(float(chance @ np.sqrt(counted)), rel=0.05)
    assert found.learning == pytest.approx(found.signal**1.5)
    assert found.dead == pytest.approx(float(chance @ (precision == 0)), abs=0.02)
    assert (found.work.prompts, found.work.rollouts) == (1, n)
    assert found.work.rows == pytest.approx(m * (1 - found.dead))


def test_the_signal_of_graded_rewards_is_rows_times_their_variance() -> None:
    alike = Model(between=0.0, exponent=1.0, error=0.0)
    pool = Pool([[0.0, 1.0, 3.0, 4.0] * 500])  # scaled to 0..1
    found = simulate(Setting(8, 8), pool, Prices(), 800, steps=200, model=alike)
    assert found.signal**2 == pytest.approx(100 * 7 * np.var([0.0, 0.25, 0.75, 1.0]), rel=0.05)


def test_more_prompts_have_more_signal_than_as_many_rows_of_one() -> None:
    few = simulate(Setting(16, 16), pool_of(0.5), Prices(), 16)
    many = simulate(Setting(4, 4), pool_of(0.5), Prices(), 16)
    assert many.dead > few.dead
    assert many.signal > few.signal
    alike = Model(between=0.0, exponent=1.0, error=0.0)
    without = [simulate(Setting(m, m), pool_of(0.5), Prices(), 16, model=alike).signal for m in (16, 4)]
    assert without[0] > without[1]


SURE = MODEL._replace(error=0.12)
CHEAP = Prices(step=0.07, rollout=0.0001, row=0.004)
HARD = (0.02, 0.05, 0.1, 0.02, 0.05, 0.1)


def planned(pool: Pool, prices: Prices, spread: float = 0.0):
    simulated = partial(simulate, pool=pool, prices=prices, rows=16)
    found = [simulated(Setting(n, 16)) for n in (16, 64, 32)]
    times = [(one.modelled * (1 - spread), one.modelled * (1 + spread)) for one in found]
    found = [replace(one, times=time) for one, time in zip(found, times, strict=True)]
    return decide(found, pool, simulated, {"plan": "a test"}, SURE)


def tables(lines: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the table of what is modelled, and of the table of what was timed."""
    found: list[list[list[str]]] = []
    for line in lines:
        words = line.replace(" -> ", "->").split()
        if line.startswith("n -> m  "):
            found.append([])
        elif found and words and re.fullmatch(r"\d+->\d+", words[0]):
            found[-1].append(words)
    modelled, timed = found
    return modelled, timed


def test_more_rollouts_are_recommended_where_they_are_cheap_and_prompts_are_hard() -> None:
    found = planned(pool_of(*HARD, rollouts=400), CHEAP)
    assert found.chosen.setting == Setting(64, 16)
    assert max(map(len, found.lines())) <= 80
    assert any(line.startswith("Recommended: 64 -> 16. ") for line in found.lines())
    assert "keep" not in " ".join(found.lines()).lower()
    _, timed = tables(found.lines())
    assert timed[0][0] == "64->16"
    assert timed[0][-1] == "recommended"


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("rates", [HARD, (0.5, 0.4, 0.6), (0.2, 0.9)])
def test_what_is_recommended_was_timed_and_has_the_highest_of_its_column(rates, spread) -> None:
    """The seconds of an untimed setting are modelled, and in another table; a certain gain decides."""
    found = planned(pool_of(*rates, rollouts=200), Prices(step=0.05, rollout=0.0003, row=0.002), spread)
    untimed = replace(found.candidates[1], setting=Setting(128, 16), modelled=1e-6, times=())
    lines = replace(found, candidates=[*found.candidates, untimed]).lines()
    modelled, timed = tables(lines)
    assert modelled[-1][0] == "128->16"
    assert "128->16" not in {row[0] for row in timed}
    (recommended,) = [row for row in timed if row[-1] == "recommended"]
    least = [float(row[2]) for row in timed]
    assert float(recommended[2]) == max(least)
    assert least == sorted(least, reverse=True)
    assert f"Recommended: {recommended[0].replace('->', ' -> ')}." in " ".join(lines)


def test_the_cost_of_a_step_is_a_number_and_no_second_verdict() -> None:
    prices = Prices(step=0.2, rollout=0.01)  # of 16, 32 and 64 rollouts: 0.36, 0.52 and 0.84 s
    found = planned(pool_of(*HARD), prices)
    costs = "one of 64 -> 16 takes 2.33 times as long and one of 32 -> 16 takes 1.44 times as long."
    assert costs in found.step_costs()
    assert "faster" not in found.step_costs()
    grpo, *others = found.candidates
    assert replace(found, candidates=[replace(grpo, times=()), *others]).step_costs() == ""  # nothing to compare with


def test_a_gain_is_the_power_of_more_signal_over_more_seconds() -> None:
    found = planned(pool_of(0.05, rollouts=4000), Prices(step=1.0, rollout=0.01), 0.0)
    grpo, pods, _ = found.candidates
    expected = (pods.signal / grpo.signal) ** MODEL.exponent / (pods.seconds / grpo.seconds)
    assert found.gains[pods.setting].median == pytest.approx(expected, rel=0.1)
    _, (more, *_) = tables(found.lines())
    assert float(more[3]) == pytest.approx(expected, rel=0.1)


def test_the_interval_of_a_gain_has_the_error_of_the_model_even_if_all_else_is_certain() -> None:
    """As many prompts as there are all have one pass rate, and every step takes a second."""
    found = planned(pool_of(*[0.05] * 200), Prices(step=1.0), 0.0)
    gain = found.gains[Setting(64, 16)]
    assert math.log(gain.high / gain.low) == pytest.approx(2 * 1.645 * SURE.error, rel=0.35)
    assert math.log(gain.high / gain.low) > 2 * 1.5 * SURE.error


def test_a_larger_error_of_the_model_keeps_grpo() -> None:
    found = planned(pool_of(*HARD, rollouts=400), CHEAP)
    simulated = partial(simulate, pool=pool_of(*HARD, rollouts=400), prices=CHEAP, rows=16)
    unsure = decide(found.candidates, pool_of(*HARD, rollouts=400), simulated, {}, MODEL._replace(error=1.0))
    assert (found.chosen.setting, unsure.chosen.setting) == (Setting(64, 16), Setting(16, 16))


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
