"""`AsyncPODSTrainer` with a real vLLM on a CPU; tests/engines/async_stub.py names what is replaced."""

from __future__ import annotations

import os
import time
from statistics import fmean

from tests import DEADLINE, until
from tests.engines.async_stub import logged, start

from .conftest import serve

STEPS = 80
COUNTED = ("groups", "dropped_groups", "rollouts", "kept_rollouts")


def test_the_reward_rises_and_a_run_whose_server_is_killed_ends_with_one_line(environment, tmp_path):
    output = tmp_path / "output.txt"
    with serve(environment, tmp_path / "server.txt") as (url, server):
        training = start(tmp_path, url, {"max_steps": STEPS}, environment=environment)
        assert training.wait(DEADLINE) == 0, output.read_text()[-5000:]
        steps = logged(tmp_path)
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
        rewards = [step["reward"] for step in steps]
        print("rewards", rewards)
        # The rewards are those of the server's text, so it has the trainer's weights.
        assert fmean(rewards[-20:]) > fmean(rewards[:20]) + 0.1, rewards
        assert max(step["sample/staleness_max"] for step in steps) <= 4
        total = {name: sum(step.get(f"pods/{name}_total", 0) for step in steps) for name in COUNTED}
        assert total["kept_rollouts"] / 8 + total["dropped_groups"] == total["rollouts"] / 32 == total["groups"]

        training = start(tmp_path, url, {"max_steps": 1000}, "--resume", environment=environment)
        until(lambda: len(logged(tmp_path)) >= STEPS + 2 or training.poll() is not None, poll=0.1)
        assert [step["step"] for step in logged(tmp_path)[STEPS : STEPS + 2]] == [STEPS + 1, STEPS + 2]
        os.killpg(server.pid, 9)
        killed = time.monotonic()
        assert training.wait(DEADLINE) == 1
        print(f"{time.monotonic() - killed:.1f} s from the kill to the end")
        last = output.read_text().splitlines()[-1]
        assert url in last, last
