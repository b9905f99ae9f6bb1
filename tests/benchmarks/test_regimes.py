"""The map of regimes on made-up runs: what is missing, which rates are chosen, what is compared, what a report says."""

from __future__ import annotations

import argparse
import csv
import math

import numpy as np
import pytest

from pods_rl.report.arms import Curve

from . import module

regimes = module("regimes")
runs, statistics = (__import__("sys").modules[f"regime_{name}"] for name in ("runs", "statistics"))


def curve(scores, seconds=(0.0, 30.0, 60.0)):
    table = np.array(scores, dtype=float)
    clock = np.tile(np.array(seconds), (len(table), 1))
    return Curve(tuple(map(str, range(len(table)))), clock[0], clock, table, np.full_like(table, math.nan))


def filled(folder, arms=runs.ARMS, rates=runs.RATES, seeds=(100, 101)):
    """A store whose files hold runs that rise to a final accuracy, best at 4e-4 and higher with more rollouts."""
    columns = dict.fromkeys(runs.RUN_COLUMNS, "1")
    rows, points = [], []
    for name in arms:
        arm = (runs.ARMS | runs.VARIANTS)[name]
        for rate, seed in ((rate, seed) for rate in rates for seed in seeds):
            key = runs.words_of(runs.Key(name, rate, seed))
            final = 0.7 + 0.05 * math.log2(arm.n / arm.m) - 0.1 * abs(math.log2(rate / 4e-4)) + 0.01 * (seed % 5)
            final -= 0.05 * bool(arm.what)
            length = f"{runs.keys_of(name).get('max_seconds', 60)}"
            rows.append(columns | key | {"max_seconds": length, "seconds_per_step": f"{1 + arm.n / arm.m / 10}"})
            for due in range(0, 65, 5):
                accuracy = 0.2 + (final - 0.2) * min(due / 50, 1)
                points.append(key | {"due": due, "seconds": due, "step": 2 * due, "accuracy": accuracy})
    runs.write_rows(folder / "runs.csv", runs.RUN_COLUMNS, rows)
    runs.write_rows(folder / "curves.csv", runs.CURVE_COLUMNS, points)
    return runs.Store(folder, 60)


def test_a_part_wants_what_the_files_lack(tmp_path):
    options = regimes.parse(["select", "--cells", "16x4-n8"])
    store = filled(tmp_path, ["16x4-n8"], [2e-4])
    wanted = runs.wanted_runs("select", store, options)
    assert {key.arm for key in wanted} == {"16x4-n8", "16x4-n4", "4x16-n16"}  # and both GRPOs of 64 rows
    assert len(wanted) == 3 * 3 * 2
    assert sum(key in store.runs for key in wanted) == 2
    assert runs.wanted_runs("compare", store, options) == []  # nothing is selected yet
    with pytest.raises(SystemExit, match="of 60 s, not 5 s"):
        runs.Store(tmp_path, 5)


def test_the_comparison_uses_no_seed_of_the_selection(tmp_path):
    store = filled(tmp_path)
    choice = runs.choose(store, "16x4-n8", runs.RATES)
    assert choice.rate == choice.by_last_third == 4e-4
    wanted = runs.wanted_runs("compare", store, regimes.parse(["compare", "--cells", "16x4-n8", "--seeds", "8"]))
    assert {(key.arm, key.rate) for key in wanted} == {("16x4-n8", 4e-4), ("16x4-n4", 4e-4)}
    assert {key.seed for key in wanted} == {*range(1, 9)}
    for words in (["compare", "--seeds", "100,101"], ["select", "--seeds", "3"]):
        with pytest.raises(SystemExit):
            regimes.parse(words)


def test_times_are_interpolated_and_paired():
    slow, fast = curve([[0.2, 0.5, 0.8]] * 5), curve([[0.2, 0.8, 0.9]] * 5)
    found = statistics.times_as_soon("time to 0.5", fast, slow, 0.5)
    assert found[1:6] == pytest.approx((15.0, 30.0, 2.0, 2.0, 2.0))
    assert (found.verdict(5), found.verdict(4)) == ("ahead", "few seeds")
    never = statistics.times_as_soon("", slow, fast, 0.9)
    assert (never.value, never.verdict(5)) == (0.0, "behind")
    assert statistics.times_as_soon("", fast, slow, 0.9).value == math.inf
    assert math.isnan(statistics.times_as_soon("", fast, slow, 0.95).value)


def test_a_paired_difference_has_students_interval():
    found = statistics.paired("", np.array([0.5, 0.6, 0.9]), np.array([0.4, 0.5, 0.5]))
    assert (round(found.value, 3), found.won) == (0.2, "3/3")
    half = 4.302653 * np.std([0.1, 0.1, 0.4], ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))


def test_the_range_of_rates_ends_between_rates():
    found = statistics.range_of([1, 2, 4, 8], [0.5, 0.8, 0.8, 0.7])
    assert (found.low, found.high) == pytest.approx((2 ** (5 / 6), 2**2.5))
    assert not found.open_low
    assert not found.open_high
    assert statistics.range_of([1, 2, 4], [0.8, 0.79, 0.2])[3:] == (True, False)


def test_a_report_says_what_is_missing(tmp_path):
    options = argparse.Namespace(cells=None, seeds=None, rates=runs.RATES, runs=tmp_path / "runs")
    empty = regimes.report(runs.Store(tmp_path / "results", 60), options)
    assert "select: 72 of 72 runs" in empty
    filled(tmp_path, [*runs.ARMS, *runs.VARIANTS], seeds=(1, 2, 3, 4, 5, 100, 101), rates=runs.RATES)
    text = regimes.report(runs.Store(tmp_path, 60), options)
    assert "compare: 0 of 60 runs" in text
    assert "range: 20 of 50 runs" in text
    assert "rules: 0 of 40 runs" in text
    assert "ladder: 9 of 24 runs" in text
    with (tmp_path / "rules.csv").open() as file:
        assert {(row["verdict"], row["won"]) for row in csv.DictReader(file)} == {("ahead", "5/5")}
    with (tmp_path / "ladder.csv").open() as file:
        times = [float(row["seconds"]) for row in csv.DictReader(file) if row["target"] == "0.5"]
    assert times == sorted(times, reverse=True)
    assert len(times) == 3
    with (tmp_path / "cells.csv").open() as file:
        cells = [row for row in csv.DictReader(file) if row["measure"] == "final accuracy"]
    assert {row["cell"] for row in cells if row["against"] == "TRL's own step"} == {
        name for name, arm in runs.ARMS.items() if arm.rows in (16, 64)
    }
    cells = [row for row in cells if row["against"] == statistics.BEST]
    assert len(cells) == 8
    assert {row["verdict"] for row in cells} == {"ahead"}
    assert {row["value"] for row in cells} == {"0.05", "0.1"}
    for name in ("headline", "map", "range"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
