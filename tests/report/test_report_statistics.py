"""The statistics: worked values and edge cases. (The authors' published runs: tests/cli/test_report.py.)"""

from __future__ import annotations

import numpy as np
import pytest

from pods_rl.report import speedup
from pods_rl.report.statistics import bootstrap_band, mean_curve, normal_band, threshold, time_ratio, time_to

NAN, INF = float("nan"), float("inf")


def test_mean_leaves_out_what_few_runs_have() -> None:
    scores = [[0.1, 0.3, 0.9], [0.3, NAN, NAN], [0.2, NAN, NAN], [0.4, 0.5, NAN]]
    np.testing.assert_allclose(mean_curve(scores), [0.25, NAN, NAN])  # two of four are no majority
    np.testing.assert_allclose(mean_curve(scores, min_share=0.0), [0.25, 0.4, 0.9])


@pytest.mark.parametrize("scores", [[0.1, 0.2], np.empty((0, 3))])
def test_mean_refuses_what_is_no_table_of_runs(scores: object) -> None:
    with pytest.raises(ValueError, match="at least one run, got shape"):
        mean_curve(scores)  # type: ignore[arg-type]


def test_normal_band_is_196_standard_errors() -> None:
    low, high = normal_band([[0.2], [0.4], [0.9]])
    half = 1.96 * np.std([0.2, 0.4, 0.9], ddof=1) / np.sqrt(3)
    np.testing.assert_allclose([low[0], high[0]], [0.5 - half, 0.5 + half])


def test_one_run_has_no_band() -> None:
    for band in (normal_band([[0.2, 0.3]]), bootstrap_band([[0.2, 0.3]])):
        assert np.isnan(band).all()


def test_bootstrap_band_is_seeded_and_inside_the_runs() -> None:
    scores = np.random.default_rng(0).uniform(size=(6, 4))
    low, high = bootstrap_band(scores, seed=3)
    np.testing.assert_array_equal(low, bootstrap_band(scores, seed=3)[0])
    assert (scores.min(axis=0) <= low).all()
    assert (low < scores.mean(axis=0)).all()
    assert (scores.mean(axis=0) < high).all()
    assert (high <= scores.max(axis=0)).all()


def test_threshold_passes_over_missing_checkpoints() -> None:
    assert threshold([NAN, 0.5, 0.4], "peak") == 0.5
    assert threshold([NAN, 0.5, 0.4], "p99") == pytest.approx(0.495)
    assert np.isnan(threshold([NAN, NAN]))
    with pytest.raises(ValueError, match="criterion is 'p90'"):
        threshold([0.5], "p90")


def test_time_to_interpolates_over_a_missing_checkpoint() -> None:
    mean, clock = [0.2, NAN, 0.6], [0.0, 5.0, 10.0]
    assert time_to(mean, clock, 0.5) == 10
    assert time_to(mean, clock, 0.5, interpolated=True) == pytest.approx(7.5)


def test_time_to_a_score_held_from_the_start_is_the_first_time_either_way() -> None:
    for interpolated in (False, True):
        assert time_to([0.5, 0.6], [3.0, 6.0], 0.4, interpolated=interpolated) == 3
        assert time_to([NAN, 0.6], [3.0, 6.0], 0.4, interpolated=interpolated) == 6


def test_time_to_is_batched() -> None:
    mean_BC = np.array([[0.1, 0.5], [0.1, 0.2]])
    np.testing.assert_array_equal(time_to(mean_BC, [1.0, 2.0], [0.4, 0.4]), [2.0, INF])


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


def test_arms_may_differ_in_runs_and_checkpoints() -> None:
    base = np.array([[0.1, 0.3, 0.5]] * 4)
    result = speedup(base, np.array([[0.0, 10.0, 20.0]] * 4), np.array([[0.1, 0.6]] * 2), np.array([[0.0, 5.0]] * 2))
    assert result.speedup == 4


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"arm scores and seconds .* got \(2, 3\) and \(2, 2\)"):
        speedup(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 3)), np.ones((2, 2)))
