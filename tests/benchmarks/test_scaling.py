"""The model of traffic against every possible choice, and against what two real processes send."""

from __future__ import annotations

from itertools import combinations
from math import comb, sqrt

import pytest

from pods_rl.engines.trl.batching import Shares
from pods_rl.engines.trl.rows import KeptRow, to_bytes

from . import module, run

traffic = module("traffic")


def test_the_chances_of_a_place_sum_to_one():
    for j in range(4):
        assert sum(traffic.chance(9, 4, j, i) for i in range(9)) == pytest.approx(1.0)


@pytest.mark.parametrize(("prompts", "n", "m", "processes"), [(1, 7, 4, 2), (3, 7, 4, 6), (2, 6, 2, 4), (4, 5, 3, 2)])
def test_rows_leaving_is_the_mean_over_all_choices(prompts, n, m, processes):
    shares = Shares(prompts, n, m, processes)
    counted = [0] * processes
    for p in range(prompts):
        for kept in combinations(range(n), m):
            for j, i in enumerate(kept):
                maker = shares.generator(p * n + i)
                counted[maker] += maker != shares.trainer(p * m + j)
    expected = [count / comb(n, m) for count in counted]
    assert traffic.rows_leaving(shares) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tokens", [1, 512])
def test_a_row_s_bytes(tokens):
    row = KeptRow([7] * tokens, "a" * (traffic.LETTERS * tokens), None, {})
    assert traffic.row_bytes(tokens) == len(to_bytes([row]))


def test_time_is_calls_messages_and_bytes():
    setting = traffic.Setting(1, 8, 4, 16)
    seen = traffic.traffic(setting, 2)
    network = traffic.Network("by hand", call=1.0, latency=0.1, bandwidth=1e6, packing=0.0)
    assert traffic.communication(setting, 2, network) == pytest.approx(7 * 1.1 + seen.total / 1e6)
    assert traffic.communication(setting, 1, network) == 0.0


@pytest.mark.slow
def test_what_two_processes_send_is_what_the_model_says(tmp_path):
    printed, figures = run("scaling", "--rounds", "8", "--processes", "1", "2", folder=tmp_path)
    assert max(map(len, printed.splitlines())) <= 80
    for seen in figures["points"]:
        setting, world = traffic.Setting(**seen["setting"]), seen["processes"]
        expected = traffic.traffic(setting, world)
        assert seen["gathered"] == expected.gathered
        rows = setting.prompts * setting.m
        sizes = 8 * world * (world - 1)
        for moving, exchanged in zip(seen["moving"], seen["exchanged"], strict=True):
            assert exchanged == moving * rows * traffic.row_bytes(setting.tokens) + (sizes if moving else 0)
        share = sum(seen["moving"]) / len(seen["moving"])
        spread = sqrt(expected.moving * (1 - expected.moving) / (rows * len(seen["moving"])))
        # Rows of a group move together or not, so their share spreads wider than that of so many coins.
        assert share == pytest.approx(expected.moving, abs=8 * spread)
    assert any(sum(seen["moving"]) for seen in figures["points"])
    assert {row["processes"] for row in figures["model"]} == {8, 16, 64, 256, 1024}
