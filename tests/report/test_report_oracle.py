"""Speedups against an oracle in plain Python: random curves, missing checkpoints, runs that died early."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pods_rl.report import Speedup, speedups

Runs = list[list[float]]  # NaN: no such checkpoint
SHARES = {"p99": 0.99, "peak": 1.0}


def speedup(
    *tables: object, criterion: str = "p99", interpolated: bool = False, resamples: int = 200, seed: int = 0
) -> Speedup:
    scores, seconds, arm_scores, arm_seconds = (np.asarray(table, dtype=float) for table in tables)
    found = speedups((scores, seconds), (arm_scores, arm_seconds), resamples=resamples, seed=seed)
    return next(one for one in found if (one.criterion, one.interpolated) == (criterion, interpolated))


def mean_at(runs: Runs, at: int) -> float | None:
    """The mean over the runs that have a checkpoint, where more than half have it."""
    values = [run[at] for run in runs if not math.isnan(run[at])]
    return sum(values) / len(values) if 2 * len(values) > len(runs) else None


def points(scores: Runs, seconds: Runs) -> list[tuple[float, float]]:
    """(time, score) of the mean curve."""
    found = []
    for at in range(len(scores[0])):
        score, time = mean_at(scores, at), mean_at(seconds, at)
        if score is not None and time is not None:
            found.append((time, score))
    return found


def first_time(curve: list[tuple[float, float]], level: float, *, interpolated: bool) -> float:
    for index, (time, score) in enumerate(curve):
        if score >= level:
            if not interpolated or index == 0:
                return time
            earlier, lower = curve[index - 1]
            return earlier + (time - earlier) * (level - lower) / (score - lower)
    return math.inf


def expected(base: tuple[Runs, Runs], arm: tuple[Runs, Runs], criterion: str, *, interpolated: bool) -> float:
    base_curve, arm_curve = points(*base), points(*arm)
    level = SHARES[criterion] * max(score for _, score in base_curve)
    base_time = first_time(base_curve, level, interpolated=interpolated)
    arm_time = first_time(arm_curve, level, interpolated=interpolated)
    if base_time == arm_time:
        return 1.0
    return 0.0 if math.isinf(arm_time) else math.inf if arm_time == 0 else base_time / arm_time


def random_arm(random: np.random.Generator) -> tuple[Runs, Runs]:
    """Rising, noisy curves on a real clock; a run in four dies early, a checkpoint in ten is missing."""
    count, checkpoints = int(random.integers(1, 6)), int(random.integers(2, 12))
    scores = np.cumsum(random.normal(0.03, 0.05, (count, checkpoints)), axis=1) + 0.3
    seconds = np.arange(checkpoints) * 10.0 + random.uniform(0, 3, (count, checkpoints))
    seconds[:, 0] = 0.0
    for run in range(count):
        if run and random.random() < 0.25:
            scores[run, random.integers(1, checkpoints) :] = np.nan
    scores[1:][random.random((count - 1, checkpoints)) < 0.1] = np.nan
    scores[:, 0] = 0.3  # every run has its first evaluation
    seconds[np.isnan(scores)] = np.nan
    return scores.tolist(), seconds.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_speedup_is_that_of_the_oracle(seed: int) -> None:
    random = np.random.default_rng(seed)
    base, arm = random_arm(random), random_arm(random)
    for criterion, interpolated in itertools.product(SHARES, (False, True)):
        result = speedup(*base, *arm, criterion=criterion, interpolated=interpolated, resamples=0)
        wanted = expected(base, arm, criterion, interpolated=interpolated)
        assert result.speedup == pytest.approx(wanted, rel=1e-9), (criterion, interpolated)


@pytest.mark.parametrize("seed", range(3))
def test_interval_is_that_of_every_possible_resample(seed: int) -> None:
    """With two runs a side there are 16 equally likely resamples, so the ends are the least and the greatest."""
    random = np.random.default_rng(seed)
    base, arm = ([random.uniform(0.2, 0.9, (2, 5)), [[0.0, 10, 20, 30, 40]] * 2] for _ in range(2))
    base[0][:, 0] = 0.1  # so that a speedup of 0 means: never reached
    ratios = [
        expected(
            tuple([part[i] for i in picked] for part in base),  # type: ignore[arg-type]
            tuple([part[i] for i in other] for part in arm),  # type: ignore[arg-type]
            "p99",
            interpolated=True,
        )
        for picked in itertools.product(range(2), repeat=2)
        for other in itertools.product(range(2), repeat=2)
    ]
    result = speedup(*base, *arm, interpolated=True, resamples=2000, seed=seed)
    assert (result.ci_low, result.ci_high) == pytest.approx((min(ratios), max(ratios)))
    assert result.never_reached == pytest.approx(ratios.count(0.0) / 16, abs=0.04)


def test_a_run_that_died_early_is_in_the_mean_as_far_as_it_got() -> None:
    clock = [[0.0, 10.0, 20.0, 30.0]] * 3
    base = [[0.2, 0.4, 0.6, 0.8]] * 3
    died = [[0.2, 0.9, math.nan, math.nan], [0.2, 0.4, 0.7, 0.8], [0.2, 0.4, 0.7, 0.8]]
    result = speedup(base, clock, died, clock, criterion="peak")
    assert result.arm_time == 30.0  # at 20 s the two left have 0.7: the one that died at 0.9 is not carried on
    alive = [[0.2, 0.9, 0.9, 0.9], *died[1:]]
    assert speedup(base, clock, alive, clock, criterion="p99").arm_time == 30.0
    most_died = [[0.2, 0.4, math.nan, math.nan]] * 2 + [[0.2, 0.4, 0.7, 0.9]]
    assert speedup(base, clock, most_died, clock).arm_time == math.inf  # one run of three is no mean
