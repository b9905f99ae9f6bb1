"""A plan's prices, simulated signal and choice, against closed forms and brute force."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from pods_rl.engines.trl.batching import BatchPlan
from pods_rl.planning.costs import Costs, Measured, Work, fit_costs, mean_seconds, non_negative
from pods_rl.planning.grid import PLANNED, Setting, plain_grpo, settings_to_compare
from pods_rl.planning.plan import Candidate, Plan, decide, finalists, frontier, model
from pods_rl.planning.signal import Batches, Observed, Pool, Simulated, fit_prior, simulate


def binomial(n: int, p: float) -> np.ndarray:
    return np.array([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])


def pool_of(rates: list[float], rollouts: int = 4000, texts: int | None = None) -> Pool:
    """Prompts whose pass rates are known almost exactly; `texts`: different ones of each outcome, None: all."""
    found = []
    for prompt, rate in enumerate(rates):
        for i in range(rollouts):
            right = float(i < rate * rollouts)
            text = len(found) if texts is None else i % texts + 1000 * int(right)
            found.append(Observed(prompt, right, 10 * right, text))
    return Pool(found)


# -- prices ----------------------------------------------------------------------------------------------------------


def test_prices_are_recovered_from_steps_that_they_make() -> None:
    prices = Costs(call=0.3, prompt=0.02, rollout=0.004, reward=0.001, step=0.1, group=0.05, row=0.01)
    rng, settings = np.random.default_rng(0), []
    for rollouts, prompts in ((16, 1), (64, 1), (64, 4)):
        steps = []
        for _ in range(5):
            work = Work(1, prompts, rollouts, rng.integers(0, prompts + 1), rng.integers(0, 17))
            generation = prices.call + prices.prompt * prompts + prices.rollout * rollouts
            rest = prices.step + prices.group * work.groups + prices.row * work.rows
            steps.append(Measured(work, generation, prices.reward * rollouts, rest))
        settings.append(steps)
    found = fit_costs(settings)
    assert vars(found) == pytest.approx(vars(prices))
    assert found.seconds(settings[1][0].work) == pytest.approx(settings[1][0].seconds)


def test_a_price_below_nothing_becomes_0_and_the_others_fit_best() -> None:
    """At the least squares above 0 the slope is 0 for each price above 0, and upwards for each at 0."""
    rng, zeros = np.random.default_rng(0), 0
    for _ in range(100):
        features, values, weights = rng.random((8, 3)), rng.normal(size=8), rng.random(8) + 0.5
        found = non_negative(features, values, weights)
        slope = (features * weights[:, None]).T @ (weights * (features @ found - values))
        assert (found >= 0).all()
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-9
        assert slope[found == 0].min(initial=0.0) > -1e-9
        zeros += int((found == 0).sum())
    assert 50 < zeros < 290


def test_a_step_that_another_program_slowed_is_left_out() -> None:
    steps = [Measured(Work(1, 1, 16, 1, 16), 0.1, 0.0, 0.1)] * 9 + [Measured(Work(1, 1, 16, 1, 16), 5.0, 0.0, 0.1)]
    assert mean_seconds(steps) == pytest.approx(0.2)
    assert fit_costs([steps]).seconds(steps[0].work) == pytest.approx(0.2)


# -- signal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m", "rate"), [(16, 16, 0.5), (16, 16, 0.1), (64, 16, 0.1), (32, 8, 0.9)])
def test_signal_and_dead_groups_are_those_of_binomial_groups(n: int, m: int, rate: float) -> None:
    right = np.arange(n + 1)
    kept = right if n == m else np.clip(np.minimum(right, m // 2), m - (n - right), m)
    precision = kept * (m - kept) / m
    found = simulate(Setting(n, m), pool_of([rate]), Batches(m), steps=4000)
    assert found.precision == pytest.approx(float(binomial(n, rate) @ precision), rel=0.05)
    assert found.signal == pytest.approx(float(binomial(n, rate) @ np.sqrt(precision)), rel=0.05)
    assert found.dead == pytest.approx(float(binomial(n, rate) @ (precision == 0)), abs=0.02)
    assert found.work.rollouts == n


def test_waves_generate_until_a_group_is_decided() -> None:
    rate, m, n = 0.2, 8, 32
    opened = [1.0]
    for end in (8, 16, 24):
        right = np.arange(end + 1)
        opened.append(float(binomial(end, rate) @ ((right < m // 2) | (end - right < m // 2))))
    found = simulate(Setting(n, m, (8, 8)), pool_of([rate]), Batches(m), steps=4000)
    assert found.work.rollouts == pytest.approx(8 * sum(opened), rel=0.02)
    assert found.work.calls == pytest.approx(sum(opened), rel=0.02)
    whole = simulate(Setting(n, m), pool_of([rate]), Batches(m), steps=4000)
    assert found.precision == pytest.approx(whole.precision, rel=0.02)  # lossless


def test_groups_of_equal_rewards_are_given_up_after_the_first_wave() -> None:
    rate = 0.05
    found = simulate(Setting(32, 8, (8, 24), 8), pool_of([rate]), Batches(8), steps=4000)
    equal = (1 - rate) ** 8 + rate**8
    assert found.work.rollouts == pytest.approx(8 + 24 * (1 - equal), rel=0.05)
    assert found.dead == pytest.approx(equal, abs=0.02)


def test_refilling_draws_until_a_group_lives_or_the_limit() -> None:
    pool, dead = pool_of([0.0, 0.5], rollouts=40_000), 0.5 + 0.5**8
    found = simulate(Setting(8, 8, None, None, "refill"), pool, Batches(8, refill_limit=2), steps=4000)
    assert found.dead == pytest.approx(dead**3, abs=0.02)
    assert found.work.rollouts == pytest.approx(8 * (1 + dead + dead**2), rel=0.03)


def test_sharing_keeps_the_rows_and_raises_the_precision() -> None:
    pool, batches = pool_of([0.0, 0.5], rollouts=40_000), Batches(32)
    kept, shared = (simulate(Setting(32, 8, dead_groups=how), pool, batches) for how in ("keep", "share"))
    assert shared.work.rollouts == kept.work.rollouts == 128
    assert shared.precision > 1.2 * kept.precision
    assert shared.work.rows > 1.2 * kept.work.rows  # of live groups


def test_rows_are_those_that_the_update_computes() -> None:
    pool = pool_of([0.5], texts=1)
    assert simulate(Setting(16, 8), pool, Batches(8)).work.rows == pytest.approx(2.0, rel=0.01)
    assert simulate(Setting(16, 8), pool, Batches(8, merges=False)).work.rows == pytest.approx(8.0, rel=0.01)
    never = pool_of([0.0], rollouts=100_000)
    assert simulate(Setting(8, 8), never, Batches(8)).work.rows == pytest.approx(0.0, abs=0.1)
    assert simulate(Setting(8, 8), never, Batches(8, skips=False, repeats=2)).work.rows == pytest.approx(16.0)


def test_a_call_holds_as_many_rollouts_as_rollout_batch_size() -> None:
    found = simulate(Setting(64, 16), pool_of([0.5]), Batches(32, chunk=24), steps=10)
    assert found.work.calls == math.ceil(128 / 24)


def test_the_signal_of_graded_rewards_is_rows_times_their_variance() -> None:
    pool = Pool([Observed(0, answer, answer, i) for i, answer in enumerate([0.0, 0.25, 0.75, 1.0] * 500)])
    found = simulate(Setting(8, 8), pool, Batches(8), steps=4000)
    assert found.precision == pytest.approx(7 * np.var([0.0, 0.25, 0.75, 1.0]), rel=0.05)


def test_a_group_repeats_no_rollout_while_enough_were_observed() -> None:
    pool = Pool([Observed(0, float(i % 2), float(i % 2), i) for i in range(64)])
    groups = pool.groups(200, 16, np.random.default_rng(0))
    assert all(len(set(group)) == 16 for group in groups.tolist())
    lone = Pool([Observed(0, 0.0, 0.0, 7)])
    totals = lone.totals_R[lone.groups(500, 8, np.random.default_rng(0))]
    assert set(totals.flatten().tolist()) == {0.0, 1.0}  # an outcome that was never seen may come


def test_the_prior_is_the_spread_that_sampling_does_not_explain() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 1.5, size=20_000)
    a, b = fit_prior(rng.binomial(8, rates), np.full(20_000, 8))
    assert (a, b) == pytest.approx((0.5, 1.5), rel=0.05)
    equal = fit_prior(rng.binomial(8, 0.3, size=20_000), np.full(20_000, 8))
    assert equal[0] + equal[1] == pytest.approx(49, rel=0.2)  # at most so sure


# -- which settings --------------------------------------------------------------------------------------------------


def test_every_setting_trains_the_recipes_rows_and_grpo_is_first() -> None:
    values = {"num_generations": 16, "num_rollouts": 64, "rollout_waves": [16, 8], "give_up_after": 40}
    found = settings_to_compare(values, BatchPlan(16, 64, 1, 32, 1, 1, None))
    assert found[0] == plain_grpo(values) == Setting(16, 16)
    assert Setting(64, 16, (16, 8), 40) in found  # the recipe's own
    assert {setting.num_generations for setting in found} == {4, 8, 16, 32}
    assert len(found) == len(set(found))
    assert all(tuple(setting.keys) == PLANNED for setting in found)


def test_settings_that_the_recipe_or_the_memory_excludes_are_not_offered() -> None:
    plan = BatchPlan(8, 8, 1, 8, 1, 1, None)
    other = settings_to_compare({"num_generations": 8, "rule": "random"}, plan)
    assert not [setting for setting in other if setting.rollout_waves or setting.dead_groups == "share"]
    small = settings_to_compare({"num_generations": 8}, plan, lambda setting: setting.num_rollouts <= 16)
    assert max(setting.num_rollouts for setting in small) == 16


# -- the choice ------------------------------------------------------------------------------------------------------


def candidate(setting: Setting, seconds: float, signal: float, timed: float | None = None) -> Candidate:
    return Candidate(setting, 1, Simulated(Work(1, 1, 1, 1, 1), signal, signal**2, 0.0), seconds, timed, 5)


def test_the_frontier_holds_what_nothing_beats() -> None:
    rng = np.random.default_rng(0)
    many = [candidate(Setting(8 + i, 8), *rng.integers(1, 20, size=2).tolist()) for i in range(60)]
    best = frontier(many)
    for one in many:
        beaten = any(
            other.seconds <= one.seconds
            and other.expected.signal >= one.expected.signal
            and (other.seconds, other.expected.signal) != (one.seconds, one.expected.signal)
            for other in many
        )
        points = {(found.seconds, found.expected.signal) for found in best}
        assert ((one.seconds, one.expected.signal) in points) == (not beaten)


PRICES = Costs(call=0.05, rollout=0.0001, step=0.02, row=0.004)


def planned(pool: Pool, costs: Costs, scale: float = 1.0) -> Plan:
    batches = Batches(16)
    candidates = model([Setting(16, 16), Setting(64, 16), Setting(64, 16, (16, 16))], pool, batches, costs)
    timed = [replace(one, timed=scale * one.seconds, steps=5) for one in finalists(candidates)]
    return decide(candidates, timed, pool, batches, costs, facts={"plan": "a test"}, notes=["A note."])


def test_more_rollouts_are_recommended_where_they_are_cheap_and_prompts_are_hard() -> None:
    found = planned(pool_of([0.02, 0.05, 0.1, 0.02, 0.05, 0.1], 400), PRICES)
    assert found.chosen.setting == Setting(64, 16)
    assert found.gain[0] > 1
    assert found.keys["num_rollouts"] == 64
    assert "Recommended: 64 -> 16, 1 prompt a step" in found.lines()


def test_a_plan_says_when_its_model_and_its_times_disagree() -> None:
    told, quiet = (planned(pool_of([0.1], 400), PRICES, scale) for scale in (1.5, 1.2))
    assert "Modelled and timed seconds differ by up to 33%" in " ".join(told.lines())
    assert quiet.notes == ["A note."]


def test_grpo_is_kept_where_rollouts_cost_what_they_bring() -> None:
    found = planned(pool_of([0.5, 0.4, 0.6], 400), Costs(call=0.01, rollout=0.01, row=0.001))
    assert found.chosen is found.base
    assert found.keys["num_rollouts"] == found.keys["num_generations"] == 16
    assert any("keep GRPO" in line for line in found.lines())


def test_grpo_is_kept_where_the_prompts_leave_the_gain_open() -> None:
    rights = ((0, 1), (1, 8))  # of 16
    few = Pool([Observed(p, float(i < right), float(i < right), i) for p, right in rights for i in range(16)])
    found = planned(few, Costs(call=0.05, rollout=0.0002, step=0.02))
    assert found.best.rate > 1.1 * found.base.rate
    assert found.gain[0] < 1 < found.gain[1]
    assert found.chosen is found.base
    assert "uncertain" in " ".join(found.reasons)


def test_of_settings_about_as_good_the_simplest_is_recommended() -> None:
    pool = pool_of([0.05, 0.1, 0.05, 0.1], 400)
    candidates = model([Setting(16, 16), Setting(64, 16), Setting(64, 16, (16, 16))], pool, Batches(16), PRICES)
    timed = [replace(one, timed=1.04 if one.setting.rollout_waves is None else 1.0, steps=5) for one in candidates]
    timed[0] = replace(timed[0], timed=2.0)
    found = decide(candidates, timed, pool, Batches(16), PRICES, facts={})
    assert found.best.setting.rollout_waves is not None
    assert found.chosen.setting == Setting(64, 16)


def test_a_plan_is_plain_data_and_fits_80_columns() -> None:
    found = planned(pool_of([0.05, 0.1], 400), PRICES)
    assert json.loads(json.dumps(found.record()))["recommended"] == found.keys
    assert max(map(len, found.lines())) <= 80


def test_few_timed_steps_leave_the_gain_open() -> None:
    pool, batches = pool_of([0.02, 0.05, 0.1] * 4, 400), Batches(16)
    candidates = model([Setting(16, 16), Setting(64, 16)], pool, batches, PRICES)
    widths = []
    for error in (0.0, 0.6):
        timed = [replace(one, timed=one.seconds, steps=2, error=error) for one in candidates]
        found = decide(candidates, timed, pool, batches, PRICES, facts={})
        widths.append(found.gain[1] - found.gain[0])
    assert widths[1] > 2 * widths[0]
