"""Selection over the batch, as the mean over the cells that were run: python benchmarks/pooled.py

Reads the `curves.csv` of each cell of batch_study.yaml that has one, and writes `docs/results/batch_pooled.csv`: for
each kind of arm, the batch against it in accuracy over time, in seconds and steps to 50 %, and in the price of a step.
Differences are means, and ratios geometric means, with an interval of 95 % of the mean over these cells, all with the
same weight. It says nothing about other tasks. A cell in which an arm does not reach 50 % has no ratio and is not
counted: the column `cells` has the number of those that are, at least two.

`predicted on a GPU` is not measured. It is the ratio of steps, times the ratio of what a step cost on one H100 with a
model of 3 billion parameters (docs/results/gpu/results.jsonl). Steps with 16 rows and with one and four times as many
rollouts were timed there; other multiples are on the straight line through the two. Dynamic sampling has no such price.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import comparisons
from batch_study import Cell, cells
from measuring import command_line
from pods_rl.report.analysis import mean_over, times_after_start
from pods_rl.report.intervals import t_quantile
from pods_rl.report.statistics import Curve, time_to

TARGET = 0.5
GPU = comparisons.RESULTS / "gpu" / "results.jsonl"
OUTPUT = comparisons.RESULTS / "batch_pooled.csv"
PREDICTED = "predicted on a GPU"


class Estimate(NamedTuple):
    """A number, its squared standard error, and the degrees of freedom of that error."""

    value: float
    square: float
    freedom: float


def jackknife(statistic: Callable[[Curve, Curve], float], arm: Curve, rival: Curve) -> Estimate:
    """Estimate a statistic of two arms with the same seeds in the same order, with the error of the jackknife.

    The error comes from the statistic without each seed in turn (Tukey, 1958), so it needs no formula of its own for
    the time at which a mean curve crosses a score. For a difference of means it is the usual paired error.
    """
    seeds = len(arm.runs)
    without = np.empty(seeds)
    for left_out in range(seeds):
        rest = [seed for seed in range(seeds) if seed != left_out]
        without[left_out] = statistic(of_runs(arm, rest), of_runs(rival, rest))
    square = float((seeds - 1) * np.mean((without - without.mean()) ** 2))
    return Estimate(statistic(arm, rival), square, seeds - 1)


def of_runs(curve: Curve, runs: Sequence[int]) -> Curve:
    """Return the curve of some of the runs, which have all ended."""
    names = tuple(curve.runs[run] for run in runs)
    return replace(
        curve, runs=names, seconds=curve.seconds[runs], scores=curve.scores[runs], errors=curve.errors[runs], ended=None
    )


def mean_estimate(estimates: Sequence[Estimate]) -> tuple[float, float, float]:
    """Return the mean of independent estimates and its 95 % interval: Student's t with Satterthwaite's freedom (1946).

    >>> mean, low, high = mean_estimate([Estimate(0.1, 0.0004, 11), Estimate(0.3, 0.0004, 11)])
    >>> round(mean, 3), round(low, 3), round(high, 3)
    (0.2, 0.171, 0.229)
    """
    mean = statistics.fmean(estimate.value for estimate in estimates)
    total = sum(estimate.square for estimate in estimates)
    if total == 0:
        return mean, mean, mean
    freedom = total**2 / sum(estimate.square**2 / estimate.freedom for estimate in estimates)
    half = t_quantile(freedom) * math.sqrt(total) / len(estimates)
    return mean, mean - half, mean + half


# -- the statistics of two arms ------------------------------------------------------------------------------------


def over_time(arm: Curve, rival: Curve) -> float:
    """Return the difference of the mean scores over the evaluations after the start that both arms have."""
    times = times_after_start(arm, rival, min(arm.end, rival.end))
    return float(np.mean(mean_over(arm, times)[0]) - np.mean(mean_over(rival, times)[0]))


def log_times(arm: Curve, rival: Curve) -> float:
    """Return the log of how many times sooner the arm's mean curve reaches the target; NaN if one does not."""
    ours = time_to(arm.mean, arm.times, TARGET)
    theirs = time_to(rival.mean, rival.times, TARGET)
    if not (0 < ours < math.inf and 0 < theirs < math.inf):
        return math.nan
    return math.log(theirs / ours)


# -- the cells -----------------------------------------------------------------------------------------------------


def gpu_prices() -> tuple[float, float]:
    """Return what a step with four times the rollouts cost on the GPU, of TRL's GRPO: with selection, and without."""
    seconds = {}
    for line in GPU.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("part") == 2 and "steps" in row:
            steps = row["steps"][1:]  # without the first, which warms up
            seconds[row["name"].partition(",")[0]] = statistics.median(sum(step.values()) for step in steps)
    once = seconds["trl 16 -> 16"]
    return seconds["tree 64 -> 16"] / once, seconds["trl 64 -> 64"] / once


def gpu_price(arm: str, rows: int) -> float:
    """Return the predicted price of an arm's step on the GPU, next to GRPO with the same rows; NaN if it is unknown."""
    kind, _, shape = arm.partition("-")
    if kind in ("grpo", "trl"):
        return 1.0
    if kind == "dynamic":
        return math.nan
    selected, trained = gpu_prices()
    if kind == "pods":
        n, m = map(int, shape.split("-"))
        times = n / m
    else:
        prompts, n = map(int, shape.split("x"))
        times = prompts * n / rows
    four_times = trained if kind == "all" else selected
    return 1 + (four_times - 1) * (times - 1) / 3


def estimates_of(cell: Cell) -> dict[tuple[str, str], Estimate]:
    """Return what the batch has against each kind of arm of a cell, by kind and measure."""
    arms = comparisons.read_evaluations(cell.results / "curves.csv")
    (subject,) = (arm for arm in arms if arm.startswith("batch-"))
    found = {}
    for rival in arms:
        kind = rival.partition("-")[0]
        if rival == subject or rival in cell.always:
            continue
        seeds = arms[subject].keys() & arms[rival].keys()
        ours = {seed: arms[subject][seed] for seed in seeds}
        theirs = {seed: arms[rival][seed] for seed in seeds}
        for measure, estimate in compare(ours, theirs).items():
            found[kind, measure] = estimate
        steps = found[kind, "steps"]
        price = math.log(gpu_price(rival, cell.rows) / gpu_price(subject, cell.rows))
        found[kind, PREDICTED] = steps._replace(value=steps.value + price)
    return found


def compare(ours: comparisons.Evaluated, theirs: comparisons.Evaluated) -> dict[str, Estimate]:
    """Return the estimates of the batch against another arm, by measure; ratios as logs."""
    by_time = comparisons.curve(ours), comparisons.curve(theirs)
    by_step = comparisons.curve(ours, "step"), comparisons.curve(theirs, "step")
    ours_R, theirs_R = map(comparisons.step_seconds, by_time, by_step)
    prices_R = np.log(ours_R / theirs_R)
    price = Estimate(float(prices_R.mean()), float(prices_R.var(ddof=1) / len(prices_R)), len(prices_R) - 1)
    return {
        comparisons.OVER_TIME: jackknife(over_time, *by_time),
        "seconds": jackknife(log_times, *by_time),
        "steps": jackknife(log_times, *by_step),
        comparisons.COST: price,
    }


def pool(of_cells: Mapping[str, Mapping[tuple[str, str], Estimate]]) -> list[dict[str, Any]]:
    """Return a row for each kind of arm and measure: the mean over the cells that have it."""
    rows = []
    for key in dict.fromkeys(key for found in of_cells.values() for key in found):
        estimates = [found[key] for found in of_cells.values() if key in found]
        known = [estimate for estimate in estimates if math.isfinite(estimate.value + estimate.square)]
        if len(known) < 2:  # the comparisons of a cell have its own intervals
            continue
        kind, measure = key
        numbers = mean_estimate(known)
        no_difference = 0.0
        if measure != comparisons.OVER_TIME:
            numbers = tuple(math.exp(number) for number in numbers)
            no_difference = 1.0
        value, low, high = numbers
        settled = not low <= no_difference <= high
        rows.append(
            {"rival": kind, "measure": measure, "cells": len(known), "value": value, "low": low, "high": high}
            | {"settled": settled}
        )
    return rows


def main() -> None:
    command_line(__doc__).parse_args()
    of_cells = {}
    for cell in cells().values():
        if (cell.results / "curves.csv").exists():
            of_cells[cell.name] = estimates_of(cell)
    if not of_cells:
        raise SystemExit("No cell has been run: python benchmarks/batch_study.py shows what remains.")
    rows = pool(of_cells)
    comparisons.write_csv(OUTPUT, rows)
    print(f"{', '.join(of_cells)}; ratios are times fewer, or times as much for {comparisons.COST}")
    for row in rows:
        verdict = "settled" if row["settled"] else "not settled"
        interval = f"{row['value']:7.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        print(f"{row['rival']:<10}{row['measure']:<20} {row['cells']} cells  {interval}  {verdict}")


if __name__ == "__main__":
    main()
