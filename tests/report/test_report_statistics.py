"""The statistics: worked values and edge cases.

The authors' published runs are in tests/cli/test_report.py, and those of our studies in tests/benchmarks.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from pods_rl.report.analysis import analyse
from pods_rl.report.arms import Arm, curve_of
from pods_rl.report.intervals import Difference, corrected, difference, half_widths, t_band
from pods_rl.report.statistics import FLAT, NEVER, SHORT, Curve, Speedup, mean_curve, speedup_to, target_of
from pods_rl.report.wording import findings

NAN, INF = float("nan"), float("inf")


def curve(scores, seconds, errors=None, due=None):
    """A curve whose nominal seconds are the mean ones by default."""
    runs = tuple(map(str, range(len(scores))))
    nominal = mean_curve(seconds) if due is None else due
    return Curve(runs, nominal, seconds, scores, np.full_like(scores, NAN) if errors is None else errors)


def speedup(*tables: object, paired: bool = False) -> Speedup:
    """The speedup to 99 % of the peak of the first arm."""
    scores, seconds, arm_scores, arm_seconds = (np.asarray(table, dtype=float) for table in tables)
    baseline = curve(scores, seconds)
    return speedup_to(baseline, curve(arm_scores, arm_seconds), target_of(baseline), paired=paired)


def test_a_level_is_reached_between_two_checkpoints_of_the_runs_that_have_them() -> None:
    """99 % of 0.5 at 19.75 s. At 10 s two of the arm's runs are at 0.55 on average, so it is there at 8.78 s."""
    clock = [0.0, 10.0, 20.0]
    arm = [[0.1, 0.5, 0.7], [0.1, 0.6, 0.7], [0.1, NAN, NAN]]
    result = speedup([[0.1, 0.3, 0.5]] * 3, [clock] * 3, arm, [clock, clock, [0.0, NAN, NAN]])
    assert result.speedup == pytest.approx(2.25)
    # the target is -1.01, which the arm has at 9.9875 s and not at 19.975 s
    assert speedup([[-9, -5, -1]] * 3, [clock] * 3, [[-9, -1, -1]] * 3, [clock] * 3).speedup == pytest.approx(2)


@pytest.mark.parametrize(("arm", "ratio", "never"), [([0.6, 0.6], INF, False), ([0.1, 0.2], 0.0, True)])
def test_reached_at_time_zero_is_infinite_and_never_is_zero(arm: list[float], ratio: float, never: bool) -> None:
    clock = np.array([[0.0, 10.0]] * 3)
    result = speedup(np.array([[0.1, 0.5]] * 3), clock, np.array([arm] * 3), clock)
    assert (result.speedup, result.ci_low, result.ci_high, result.never_reached) == (ratio, ratio, ratio, never)


@pytest.mark.parametrize("base", [[0.0, 0.0, 0.0], [0.5, 0.4, 0.3], [0.5, 0.504, 0.5]])
def test_there_is_no_speedup_against_a_baseline_that_never_rose(base: list[float]) -> None:
    clock = np.array([[0.0, 10.0, 20.0]] * 3)
    for arm in ([0.5, 0.7, 0.9], [0.0, 0.0, 0.0]):
        result = speedup(np.array([base] * 3), clock, np.array([arm] * 3), clock)
        assert result.problem == FLAT
        assert np.isnan([result.speedup, result.ci_low, result.ci_high]).all()
        assert not result.settled
        assert not result.never_reached


def test_there_is_no_speedup_to_a_level_within_the_noise_of_the_baseline_s_rise() -> None:
    """The baseline gains 1, 2 and 6 points: 3 on average, with an interval of 6.6. Of one run, evaluations give it."""
    clock = np.array([[0.0, 8.0]] * 3)
    base = curve(np.array([[0.20, 0.21], [0.20, 0.22], [0.20, 0.26]]), clock)
    arm = curve(np.array([[0.2, 0.6]] * 3), clock)
    for baseline, compared in ((base, arm), (arm, base)):  # the second only at a score that the first never reaches
        found = speedup_to(baseline, compared, 0.225)
        assert (found.problem == FLAT) == (baseline is base)
    assert math.isnan(speedup_to(base, arm, 0.225).speedup)
    for error, problem in ((0.001, ""), (0.02, FLAT)):
        one = curve(base.scores[2:], clock[2:], np.full((1, 2), error))
        # the rise of 2.5 points is below 1.96 standard errors of a difference of two evaluations, 5.5 points
        assert speedup_to(one, arm, 0.225).problem == problem


def test_an_arm_that_ends_before_the_baseline_has_the_level_may_still_reach_it() -> None:
    """By the nominal seconds, since the last step of each run ends at another real second."""
    base = curve(np.array([[0.1, 0.3, 0.6]] * 3), np.array([[0.0, 10.0, 20.4]] * 3), due=np.array([0.0, 10, 20]))
    short = curve(base.scores[:, :2], base.seconds[:, :2], due=np.array([0.0, 10]))
    low = curve(np.array([[0.1, 0.2, 0.3]] * 3), np.array([[0.0, 10.0, 20.1]] * 3), due=np.array([0.0, 10, 20]))
    early, never = (speedup_to(base, arm, target_of(base)) for arm in (short, low))
    assert (early.problem, early.never_reached) == (SHORT, False)
    assert math.isnan(early.speedup)
    assert (never.problem, never.never_reached, never.speedup) == ("", True, 0.0)
    swapped = speedup_to(short, base, 0.5)
    assert (swapped.problem, swapped.baseline_time) == (SHORT, math.inf)
    assert math.isnan(swapped.speedup)


@pytest.mark.parametrize("runs", [1, 2])
def test_fewer_than_three_runs_on_either_side_give_no_interval(runs: int) -> None:
    many, clock = np.array([[0.1, 0.5]] * 3), np.array([[0.0, 10.0]] * 3)
    for base, arm in ((many, many[:runs]), (many[:runs], many)):
        result = speedup(base, clock[: len(base)], arm, clock[: len(arm)])
        assert result.speedup == 1
        assert np.isnan([result.ci_low, result.ci_high]).all()
        gap = difference(base[:, 1], arm[:, 1])
        assert np.isnan([gap.low, gap.high, gap.p]).all()


# ------------------------------------------------------------------------------------ differences of final scores


def test_a_difference_is_welchs() -> None:
    found = difference(np.array([0.80, 0.82, 0.84]), np.array([0.60, 0.65, 0.70]))
    ours, theirs = 0.02**2 / 3, 0.05**2 / 3  # variances over counts
    assert found.mean == pytest.approx(0.17)
    freedom = (ours + theirs) ** 2 / (ours**2 / 2 + theirs**2 / 2)
    assert 2.6 < freedom < 2.7
    assert found.high - found.mean == pytest.approx(found.mean - found.low)
    half = found.high - found.mean
    assert 3.182 * np.sqrt(ours + theirs) < half < 4.303 * np.sqrt(ours + theirs)  # of 3 and of 2 degrees
    assert found.settled
    other_side = -found
    assert (other_side.mean, other_side.low, other_side.high) == (-found.mean, -found.high, -found.low)


def test_equal_seeds_are_compared_in_pairs() -> None:
    ours, theirs = np.array([0.50, 0.70, 0.90]), np.array([0.48, 0.67, 0.88])
    found = difference(ours, theirs, paired=True)
    half = 4.302653 * np.std([0.02, 0.03, 0.02], ddof=1) / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))
    assert found.settled
    assert not difference(ours, theirs).settled  # the spread over seeds hides it


def test_a_seed_that_one_side_lacks_is_not_paired() -> None:
    ours = np.array([[0.5], [0.6], [0.9]])
    theirs = np.array([[0.4], [np.nan], [0.6]])
    expected_half = half_widths(ours, theirs, paired=False)
    np.testing.assert_array_equal(half_widths(ours, theirs, paired=True), expected_half)


def test_equal_runs_differ_by_no_less_than_the_error_of_their_evaluations() -> None:
    ours, theirs = np.array([0.812, 0.812, 0.812]), np.array([0.836, 0.836, 0.836])
    assert difference(ours, theirs).settled
    assert not difference(ours, theirs, 0.014, 0.014).settled
    assert difference(np.ones(3), np.ones(3)).p == 1


# ------------------------------------------------------------------------------------------------------- coverage

TRIALS = 1500
POINTS = 0.02  # the coverage may miss 95 % by this much at 8 and 12 seeds


def share_within(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    return float(np.mean((low <= truth + 1e-9) & (truth <= high + 1e-9)))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("effect", [0.0, 0.03])
@pytest.mark.parametrize("runs", [3, 8, 12])
def test_intervals_of_scores_cover_a_null_and_a_known_effect(runs: int, effect: float, paired: bool) -> None:
    """Binomial evaluations of policies that differ by seed; with pairs half of this is common to both arms."""
    random = np.random.default_rng(runs)
    shared, ours, theirs = random.normal(0, 0.02, (3, runs, TRIALS))
    common = shared if paired else np.zeros_like(shared)
    arm = random.binomial(512, 0.7 + effect + common + ours) / 512
    other = random.binomial(512, 0.7 + common + theirs) / 512
    half = half_widths(arm, other, paired=paired)
    gap = arm.mean(axis=0) - other.mean(axis=0)
    low, high = t_band(arm)
    for covered in (share_within(gap - half, gap + half, effect), share_within(low, high, 0.7 + effect)):
        assert 0.95 - POINTS <= covered <= 0.95 + POINTS


def evals_of(random: np.random.Generator, curves: np.ndarray, difficulty: np.ndarray) -> dict[str, list[dict]]:
    """Evaluations of runs at T times on the same prompts, ``curves`` ``[R, T]`` above the ``difficulty`` of each."""
    right = np.clip(difficulty + curves[..., None], 0, 1)  # [R, T, prompts]
    scores = (random.random(right.shape) < right).mean(axis=-1)
    evals = {}
    for run, row in enumerate(scores):
        points = [{"due": 5.0 * t, "seconds": 5.0 * t, "accuracy": score} for t, score in enumerate(row.tolist())]
        evals[str(run)] = [point | {"prompts": len(difficulty)} for point in points]
    return evals


@pytest.mark.parametrize(("runs", "spread"), [(3, 0.03), (12, 0.0), (12, 0.03)])
def test_intervals_over_time_cover_95_percent_where_seeds_differ_and_more_where_they_do_not(runs, spread):
    """Six evaluations on the same 64 prompts, easy ones and hard ones, in every run, of arms without a difference.

    With an error that does not fall with the number of evaluations, the interval would cover all of these.
    """
    random = np.random.default_rng(runs)
    trials = 200
    covered = 0
    for _ in range(trials):
        difficulty = 0.6 * random.beta(2, 2, 64)
        arms = []
        for name in ("grpo", "pods"):
            curves = np.linspace(0, 0.3, 6) + random.normal(0, spread, (runs, 1))
            arms.append(Arm(name, name, curve_of(evals_of(random, curves, difficulty), "accuracy"), {}))
        (pair,) = analyse(arms, baseline="grpo", metric="accuracy").pairs
        covered += pair.over_time.low <= 0 <= pair.over_time.high
    allowed = POINTS + 2 * math.sqrt(0.05 * 0.95 / trials)
    assert covered / trials >= 0.95 - allowed
    if spread:
        assert covered / trials < 0.99


def test_a_report_on_arms_without_a_difference_seldom_says_settled() -> None:
    """The quickstart: three arms, ten seeds, two evaluations after the start, three pairs with two tests each.

    Without a correction this was one experiment in eight.
    """
    random = np.random.default_rng(0)
    trials = 200
    pairs = [("grpo", "grpo-trl", ""), ("pods", "grpo", ""), ("pods", "grpo-trl", "")]
    wrong = 0
    for _ in range(trials):
        arms = []
        seeds = random.normal(0, 0.02, (10, 1))
        for name in ("grpo-trl", "grpo", "pods"):
            curves = np.array([0.0, 0.2, 0.3]) + seeds + random.normal(0, 0.03, (10, 1))
            evals = evals_of(random, curves, np.full(128, 0.3))
            arms.append(Arm(name, name, curve_of(evals, "accuracy"), {}))
        analysis = analyse(arms, baseline="grpo-trl", metric="accuracy", pairs=pairs)
        assert len(analysis.pairs) == 3
        wrong += any(finding.number for finding in findings(analysis))
    assert wrong / trials <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)


def test_p_values_are_corrected_by_holm() -> None:
    """Worked: 4 x 0.01, then 3 x 0.013 (below the one before), 2 x 0.03, and 0.5. One without a p-value is no test."""
    values = [0.03, 0.01, math.nan, 0.5, 0.013]
    found = [gap.p for gap in corrected([Difference(0.1, 0.01, 0.2, p=p) for p in values])]
    assert found == pytest.approx([0.06, 0.04, math.nan, 0.5, 0.04], nan_ok=True)


def test_a_p_value_is_below_5_percent_where_the_interval_excludes_0() -> None:
    random = np.random.default_rng(0)
    for runs in (3, 5, 10):
        for paired in (False, True):
            for error in (math.nan, 0.01):
                for _ in range(50):
                    arm, other = random.normal(0.03 * np.arange(2)[:, None], 0.03, (2, runs))
                    gap = difference(arm, other, error, error, paired=paired)
                    # a fractional number of degrees of freedom is rounded for the interval
                    if abs(gap.p - 0.05) > 0.002:
                        assert (gap.p < 0.05) == (gap.low > 0 or gap.high < 0)


@pytest.mark.parametrize("effect", [1.0, 1.5])
@pytest.mark.parametrize("runs", [3, 12])
def test_intervals_of_speedups_cover_a_null_and_a_known_effect(runs: int, effect: float) -> None:
    """Curves that saturate, with rates, ends and evaluations that differ by seed; the arm's clock is faster.

    The crossing is interpolated: at checkpoints the true ratio is that of their times.
    """
    trials = 600
    random, clock = np.random.default_rng(runs), np.linspace(0, 60, 21)
    low, high = np.empty(trials), np.empty(trials)
    clocks = np.broadcast_to(clock, (runs, len(clock)))
    for trial in range(trials):
        shared, *own = random.normal(0, 1, (3, runs, 1))
        top = 0.2 + 0.62 + 0.02 * random.normal(0, 1, (2, runs, 1))
        # half of what a seed does to the rate is common to both arms
        rates = [
            0.04 * scale * np.exp(0.2 * math.sqrt(0.5) * (shared + one))
            for scale, one in zip((1.0, effect), own, strict=True)
        ]
        base, arm = (
            random.binomial(256, 0.2 + (end - 0.2) * (1 - np.exp(-rate * clock))) / 256
            for rate, end in zip(rates, top, strict=True)
        )
        found = speedup(base, clocks, arm, clocks, paired=True)
        low[trial], high[trial] = found.ci_low, found.ci_high
    allowed = POINTS + 2 * math.sqrt(0.05 * 0.95 / trials)
    assert abs(share_within(low, high, effect) - 0.95) <= allowed


@pytest.mark.parametrize("effect", [1.0, 1.5])
def test_intervals_of_times_to_a_target_cover_a_null_and_a_known_effect(effect: float) -> None:
    """One prompt a step: curves that still rise at the end, and reach the higher target in some experiments only."""
    trials, runs = 500, 12
    random, clock = np.random.default_rng(runs), np.linspace(0, 60, 11)
    clocks = np.broadcast_to(clock, (runs, len(clock)))
    bounds = np.empty((trials, 2, 2))
    for trial in range(trials):
        shared, *own = random.normal(0, 1, (3, runs, 1))
        tables = []
        for scale, one in zip((1.0, effect), own, strict=True):
            rate = 0.02 * scale * np.exp(0.2 * math.sqrt(0.5) * (shared + one))
            scores = random.binomial(128, 0.2 + 0.65 * (1 - np.exp(-rate * clock))) / 128
            tables.append(curve(scores, clocks))
        for place, target in enumerate((0.5, 0.6)):
            found = speedup_to(*tables, target, paired=True)
            bounds[trial, place] = found.ci_low, found.ci_high
    allowed = POINTS + 2 * math.sqrt(0.05 * 0.95 / trials)
    for low, high in bounds.transpose(1, 2, 0):
        known = ~np.isnan(low)  # neither arm may reach it
        assert known.mean() > 0.9
        assert abs(share_within(low[known], high[known], effect) - 0.95) <= allowed


def test_an_arm_that_alone_reaches_a_target_is_infinitely_faster() -> None:
    clock = np.array([[0.0, 30.0, 60.0]] * 3)
    slow = curve(np.array([[0.2, 0.30, 0.40], [0.2, 0.32, 0.41], [0.2, 0.31, 0.45]]), clock)
    fast = replace(slow, scores=slow.scores + np.array([0.0, 0.2, 0.4]))
    found = speedup_to(slow, fast, 0.6)
    assert found.speedup == math.inf == found.baseline_time
    assert found.ci_low > 1
    assert found.ci_high == math.inf
    assert found.settled
    other = speedup_to(fast, slow, 0.6)
    assert other.speedup == 0 == other.ci_low
    assert other.ci_high < 1
    assert other.never_reached
    neither = speedup_to(fast, slow, 0.95)
    assert math.isnan(neither.speedup)
    assert neither.problem == NEVER
