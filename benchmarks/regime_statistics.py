"""PODS against its rival, paired by seed, and the range of learning rates that an arm bears."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pods_rl.report.arms import Curve
from pods_rl.report.intervals import Z_95, Array, difference
from pods_rl.report.statistics import mean_curve, time_ratio, time_to
from regime_runs import (
    ARMS,
    FIRST_SELECTION_SEED,
    FIXED,
    RANGE_ARMS,
    RANGE_RATES,
    SEEDS,
    TRL,
    VARIANTS,
    Arm,
    Choice,
    Store,
    grpo_of,
    last_third,
    over_time,
    rival_of,
)

FEW = 5
"""The paper's smallest number of runs. Below it a percentile bootstrap of noise excludes no difference too often."""

WITHIN = 0.05  # of the best rate's accuracy: the range of rates that an arm bears
HALFWAY = 0.5
HIGH = 0.8
BEST = "the best GRPO with as many rows a step"
SAME_M = "GRPO with the same m"


class Measure(NamedTuple):
    """A cell against its rival: both values, and their ratio or difference with its 95 % interval."""

    name: str
    first: float
    second: float
    value: float
    low: float
    high: float
    won: str = ""

    @property
    def is_ratio(self) -> bool:
        return not self.won

    def verdict(self, seeds: int) -> str:
        """Return ahead or behind, level if the interval includes no difference, else why nothing can be said."""
        even = 1.0 if self.is_ratio else 0.0
        if math.isnan(self.value):
            return "not reached"
        if seeds < FEW:
            return "few seeds"
        if self.low > even:
            return "ahead"
        return "behind" if self.high < even else "level"

    @property
    def text(self) -> str:
        if math.isnan(self.value):
            return "neither reaches it"
        if not self.is_ratio:
            return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
        if self.value == 0:
            return "only the rival reaches it"
        if math.isinf(self.value):
            return "the rival never reaches it"
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Cell:
    """An arm and its rival, at their best rates, on the seeds that both have; `kind` says which rival it is."""

    kind: str
    arm: Arm
    rival: Arm
    rates: tuple[float, float]
    seeds: tuple[int, ...]
    measures: dict[str, Measure]


def normal_band(scores_RC: Array) -> tuple[Array, Array]:
    """Return the band of the committed figures: the mean plus and minus 1.96 standard errors over runs, as the paper's.

    NaN at a checkpoint that fewer than two runs have.
    """
    mean = mean_curve(scores_RC)
    count = (~np.isnan(scores_RC)).sum(axis=0)
    spread = np.sqrt(np.nansum((scores_RC - mean) ** 2, axis=0) / np.maximum(count - 1, 1))
    half = np.where(count > 1, Z_95 * spread / np.sqrt(np.maximum(count, 1)), np.nan)
    return mean - half, mean + half


def resamples(runs: int, count: int = 2000) -> Array:
    """Return how often each resample has each seed, ``[B, R]``, the same for both arms of a pair."""
    drawn = np.random.default_rng(0).integers(runs, size=(count, runs))
    return (drawn[:, :, None] == np.arange(runs)).sum(axis=1).astype(np.float64)


def interval(values: Array) -> tuple[float, float]:
    defined = values[~np.isnan(values)]
    if len(defined) < len(values) / 2:
        return math.nan, math.nan
    low, high = np.quantile(defined, [0.025, 0.975], method="inverted_cdf")  # values that occur: infinity stays itself
    return float(low), float(high)


def times_as_soon(name: str, arm: Curve, rival: Curve, target: float) -> Measure:
    """Return the rival's time to an accuracy over the arm's, with a bootstrap over the seeds of both together.

    Infinite if only the arm reaches it, 0 if only the rival does, NaN if neither does.
    """

    def reached(curve: Curve, drawn: Array | None) -> Array:
        return time_to(mean_curve(curve.scores, drawn), mean_curve(curve.seconds, drawn), target, interpolated=True)

    def ratio(drawn: Array | None) -> tuple[Array, Array, Array]:
        arm_time = reached(arm, drawn)
        rival_time = reached(rival, drawn)
        only_arm = np.isfinite(arm_time) & np.isinf(rival_time)
        return arm_time, rival_time, np.where(only_arm, np.inf, time_ratio(rival_time, arm_time))

    arm_time, rival_time, value = map(float, ratio(None))
    bounds = interval(ratio(resamples(len(arm.scores)))[2]) if len(arm.scores) > 1 else (math.nan, math.nan)
    return Measure(name, arm_time, rival_time, value, *bounds)


def mean_ratio(name: str, arm_R: Array, rival_R: Array) -> Measure:
    """Return the mean of the arm over that of the rival, with a bootstrap over seeds."""
    drawn = resamples(len(arm_R))
    bounds = interval((drawn @ arm_R) / (drawn @ rival_R)) if len(arm_R) > 1 else (math.nan, math.nan)
    return Measure(name, float(arm_R.mean()), float(rival_R.mean()), float(arm_R.mean() / rival_R.mean()), *bounds)


def paired(name: str, arm_R: Array, rival_R: Array) -> Measure:
    """Return the mean difference of paired seeds with Student's interval, and how many seeds are above 0."""
    deltas = arm_R - rival_R
    welch = difference(deltas, np.zeros_like(deltas))  # with a constant, Welch's interval is the paired one
    won = f"{int((deltas > 0).sum())}/{len(deltas)}"
    return Measure(name, float(arm_R.mean()), float(rival_R.mean()), welch.mean, welch.low, welch.high, won)


def pairs(choices: dict[str, Choice | None]) -> list[tuple[str, tuple[str, float], tuple[str, float]]]:
    """Return what is compared: the kind of the other arm, and both arms with their learning rates."""
    chosen = FIXED | {name: choice.rate for name, choice in choices.items() if choice}
    wanted = []
    for arm in ARMS.values():
        if not arm.is_grpo:
            wanted.append((BEST, arm.name, rival_of(arm, choices)))
            wanted.append((SAME_M, arm.name, next(name for name in grpo_of(arm) if ARMS[name].m == arm.m)))
        for trl in VARIANTS.values():
            if trl.what == TRL and ARMS[trl.base].rows == arm.rows:
                wanted.append((TRL, arm.name, trl.name))
    compared = []
    for kind, name, rival in wanted:
        if rival and {name, rival} <= chosen.keys():
            compared.append((kind, (name, chosen[name]), (rival, chosen[rival])))
    return compared


def compare_cells(store: Store, choices: dict[str, Choice | None]) -> list[Cell]:
    """Return every pair of arms that has seeds in common; scores are compared up to the end of the shorter arm."""
    cells = []
    for kind, *pair in pairs(choices):
        shared_seeds = set.intersection(*(store.seeds(name, rate) for name, rate in pair))
        seeds = sorted(seed for seed in shared_seeds if seed < FIRST_SELECTION_SEED)
        if not seeds:
            continue
        clock = [store.curve(name, rate, seeds, "seconds") for name, rate in pair]
        steps = [store.curve(name, rate, seeds, "step") for name, rate in pair]
        cost = [store.column(name, rate, seeds, "seconds_per_step") for name, rate in pair]
        end = min(curve.due[-1] for curve in clock)
        shared = [until(curve, end) for curve in clock]
        measures = [
            *(times_as_soon(f"time to {target:g}", *clock, target) for target in (HALFWAY, HIGH)),
            *(times_as_soon(f"steps to {target:g}", *steps, target) for target in (HALFWAY, HIGH)),
            paired("accuracy over time", *map(over_time, shared)),
            paired("final accuracy", *(curve.scores[:, -1] for curve in shared)),
            paired("spread over the last third", *(np.nanstd(last_third(curve), axis=1, ddof=1) for curve in shared)),
            mean_ratio("seconds a step", *cost),
        ]
        named = {measure.name: measure for measure in measures}
        arms = (((ARMS | VARIANTS)[name]) for name, _ in pair)
        cells.append(Cell(kind, *arms, (pair[0][1], pair[1][1]), tuple(seeds), named))
    return cells


def until(curve: Curve, end: float) -> Curve:
    """Return a curve without its evaluations after `end` nominal seconds."""
    kept = curve.due <= end
    return replace(
        curve,
        due=curve.due[kept],
        seconds=curve.seconds[:, kept],
        scores=curve.scores[:, kept],
        errors=curve.errors[:, kept],
    )


class Range(NamedTuple):
    """The learning rates between which an arm is within 0.05 of its best; open where the rates tried end."""

    low: float
    high: float
    best: float
    open_low: bool
    open_high: bool

    @property
    def text(self) -> str:
        least = "at least " if self.open_low or self.open_high else ""
        return f"{self.low:.2g} to {self.high:.2g}: {least}a factor of {self.high / self.low:.1f}"


def range_of(rates: Sequence[float], scores: Sequence[float]) -> Range:
    """Return the range around the best rate, with straight lines between rates on a logarithmic axis.

    >>> range_of([1, 2, 4, 8], [0.5, 0.8, 0.8, 0.7])
    Range(low=1.78..., high=5.65..., best=2, open_low=False, open_high=False)
    """
    best = int(np.argmax(scores))
    level = scores[best] - WITHIN
    octaves = np.log2(rates)
    ends = []
    for direction in (-1, 1):
        at = best
        while 0 <= at + direction < len(rates) and scores[at + direction] >= level:
            at += direction
        beyond = at + direction
        if not 0 <= beyond < len(rates):
            ends.append((float(rates[at]), True))
            continue
        share = (scores[at] - level) / (scores[at] - scores[beyond])
        end = octaves[at] + share * (octaves[beyond] - octaves[at])
        ends.append((float(2**end), False))
    (low, open_low), (high, open_high) = ends
    return Range(low, high, rates[best], open_low, open_high)


class RateCurve(NamedTuple):
    """An arm over learning rates: those that have runs, and each run's accuracy over the last third ``[rates, R]``."""

    arm: Arm
    rates: list[float]
    seeds: list[int]
    scores: Array
    mean: Range
    by_seed: list[Range]


def rate_curves(store: Store) -> list[RateCurve]:
    """Return the arms of the learning-rate range that have all seeds at two rates or more."""
    curves = []
    for name in RANGE_ARMS:
        rates = [rate for rate in RANGE_RATES if store.seeds(name, rate).issuperset(SEEDS["range"])]
        if len(rates) < 2:
            continue
        shared = set.intersection(*(store.seeds(name, rate) for rate in rates))
        seeds = sorted(seed for seed in shared if seed >= FIRST_SELECTION_SEED)
        scores = np.array([np.nanmean(last_third(store.curve(name, rate, seeds)), axis=1) for rate in rates])
        mean_range = range_of(rates, [*scores.mean(axis=1)])
        seed_ranges = [range_of(rates, [*column]) for column in scores.T]
        curves.append(RateCurve(ARMS[name], rates, seeds, scores, mean_range, seed_ranges))
    return curves
