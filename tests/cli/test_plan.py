"""`pods plan` through the real command, on a random policy that trains in a second."""

from __future__ import annotations

import pytest

import pods_rl.planning.measure
import pods_rl.planning.signal

from . import pods
from .test_whole_run import place  # noqa: F401  (a fixture)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_is_measured_and_printed(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pods_rl.planning.measure, "_MOST_ROUNDS", 2)
    monkeypatch.setattr(pods_rl.planning.signal, "_STEPS", 20)
    done = pods("plan", "r.yaml", "--seconds", "1")
    assert max(map(len, done.output.splitlines())) <= 80
    assert " of 0 s" not in done.output
    for part in (
        "rewards",
        "prices",
        "completions",
        "rollouts are distinct",
        "Modelled with these prices",
        "Timed here, and the gain in speed over GRPO",
        "Limits:",
        "Recommended: ",
        "Train with: pods train r.yaml --num_generations ",
        "importing torch and TRL",
    ):
        assert part in done.output
