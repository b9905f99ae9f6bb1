"""The statistics: worked values and edge cases. (The authors' published runs: tests/cli/test_report.py.)"""

from __future__ import annotations

import numpy as np
import pytest

from pods_rl.report import Speedup, speedups
from pods_rl.report.statistics import difference, mean_curve, normal_band, threshold, time_ratio, time_to

NAN, INF = float("nan"), float("inf")


def speedup(
    base: np.ndarray, clock: np.ndarray, arm: np.ndarray, arm_clock: np.ndarray, resamples: int = 500
) -> Speedup:
    return next(speedups((base, clock), (arm, arm_clock), resamples=resamples))


def test_mean_leaves_out_what_few_runs_have() -> None:
    scores = [[0.1, 0.3, 0.9], [0.3, NAN, NAN], [0.2, NAN, NAN], [0.4, 0.5, NAN]]
    np.testing.assert_allclose(mean_curve(scores), [0.25, NAN, NAN])  # two of four are no majority
    np.testing.assert_allclose(mean_curve(scores, min_share=0.0), [0.25, 0.4, 0.9])


def test_normal_band_is_196_standard_errors() -> None:
    low, high = normal_band([[0.2], [0.4], [0.9]])
    half = 1.96 * np.std([0.2, 0.4, 0.9], ddof=1) / np.sqrt(3)
    np.testing.assert_allclose([low[0], high[0]], [0.5 - half, 0.5 + half])


def test_threshold_passes_over_missing_checkpoints() -> None:
    assert threshold([NAN, 0.5, 0.4], "peak") == 0.5
    assert threshold([NAN, 0.5, 0.4], "p99") == pytest.approx(0.495)
    assert np.isnan(threshold([NAN, NAN]))
    with pytest.raises(ValueError, match="criterion is 'p90'"):
        threshold([0.5], "p90")


def test_time_to_a_score_held_from_the_start_is_the_first_time_either_way() -> None:
    for interpolated in (False, True):
        assert time_to([0.5, 0.6], [3.0, 6.0], 0.4, interpolated=interpolated) == 3
        assert time_to([NAN, 0.6], [3.0, 6.0], 0.4, interpolated=interpolated) == 6


def test_ratio_has_a_value_for_every_pair() -> None:
    np.testing.assert_array_equal(time_ratio([4, 4, 4, 0, INF], [2, INF, 0, 0, 2]), [2, 0, INF, 1, NAN])


def test_reached_at_time_zero_is_infinite_and_keeps_an_interval() -> None:
    clock = np.array([[0.0, 10.0]] * 3)
    result = speedup(np.array([[0.1, 0.5]] * 3), clock, np.array([[0.6, 0.6]] * 3), clock)
    assert (result.speedup, result.ci_low, result.ci_high, result.never_reached) == (INF, INF, INF, 0.0)


def test_never_reached_counts_as_zero() -> None:
    clock = np.array([[0.0, 10.0]] * 3)
    result = speedup(np.array([[0.1, 0.5]] * 3), clock, np.array([[0.1, 0.2]] * 3), clock)
    assert (result.speedup, result.arm_time, result.ci_high, result.never_reached) == (0.0, INF, 0.0, 1.0)


def test_share_that_never_reaches_is_that_of_resamples() -> None:
    clock = np.array([[0.0, 10.0]] * 2)
    arm = np.array([[0.1, 0.6], [0.1, 0.3]])  # only a resample of two failures stays below 0.495
    arm_mean_of_failures = 0.3
    result = speedup(np.array([[0.1, 0.45]] * 2), clock, arm, clock, resamples=4000)
    assert arm_mean_of_failures < result.threshold < arm.mean(axis=0)[1]
    assert result.never_reached == pytest.approx(0.25, abs=0.03)


def test_one_run_on_either_side_gives_no_interval() -> None:
    many, clock = np.array([[0.1, 0.5]] * 3), np.array([[0.0, 10.0]] * 3)
    for base, arm in ((many, many[:1]), (many[:1], many)):
        result = speedup(base, clock[: len(base)], arm, clock[: len(arm)])
        assert result.speedup == 1
        assert np.isnan([result.ci_low, result.ci_high, result.never_reached]).all()


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"arm scores and seconds .* got \(2, 3\) and \(2, 2\)"):
        speedup(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 3)), np.ones((2, 2)))


# ------------------------------------------------------------------------------------ differences of final scores


def test_a_difference_is_welchs() -> None:
    found = difference(np.array([0.80, 0.82, 0.84]), np.array([0.60, 0.70]))
    square = 0.02**2 / 3 + 0.005 / 2  # variances over counts; almost all of it is the second arm's, with 1 degree
    assert found.mean == pytest.approx(0.17)
    freedom = square**2 / ((0.02**2 / 3) ** 2 / 2 + 0.0025**2)
    assert 1 < freedom < 1.2
    assert found.high - found.mean == pytest.approx(found.mean - found.low)
    assert 12.706 * np.sqrt(square) * 0.75 < found.high - found.mean < 12.706 * np.sqrt(square)
    assert not found.settled


def test_one_run_settles_no_difference() -> None:
    found = difference(np.array([0.9]), np.array([0.1, 0.2]))
    assert np.isnan([found.low, found.high]).all()
    assert not found.settled


def test_equal_runs_differ_by_no_less_than_the_error_of_their_evaluations() -> None:
    ours, theirs = np.array([0.812, 0.812, 0.812]), np.array([0.836, 0.836, 0.836])
    assert difference(ours, theirs).settled
    assert not difference(ours, theirs, 0.014, 0.014).settled


@pytest.mark.parametrize("runs", [2, 3, 5, 8])
def test_noise_is_hardly_ever_a_settled_difference(runs: int) -> None:
    """Arms of one distribution: at most the nominal 5 % of them, plus two standard errors of that share."""
    random, trials = np.random.default_rng(runs), 400
    found = [difference(*random.normal(0.8, 0.02, (2, runs))).settled for _ in range(trials)]
    assert np.mean(found) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / trials)


@pytest.mark.parametrize("runs", [2, 5, 8])
def test_noise_is_hardly_ever_sooner_or_later(runs: int) -> None:
    random, clock = np.random.default_rng(runs), np.arange(11) * 6.0
    trials, sooner, later = 100, 0, 0
    for _ in range(trials):
        rates = 0.05 * np.exp(random.normal(0, 0.2, (2, runs, 1)))
        scores = random.binomial(256, 0.2 + 0.62 * (1 - np.exp(-rates * clock))) / 256
        clocks = np.broadcast_to(clock, scores[0].shape)
        found = speedup(scores[0], clocks, scores[1], clocks, resamples=200)
        sooner += found.settled and found.speedup > 1
        later += found.settled and found.speedup < 1
    assert max(sooner, later) <= trials * (0.05 + 2 * np.sqrt(0.05 * 0.95 / trials))
