"""`AsyncPODSTrainer` with a real vLLM on a CPU; asynchronous.py names what is replaced."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from statistics import fmean

import pytest

from tests import DEADLINE, until

from .asynchronous import logged, start
from .conftest import serve

STEPS = 80
COUNTED = ("groups", "dropped_groups", "rollouts", "kept_rollouts")
SMALL = {
    "prompts": 12, "num_generations": 4, "num_rollouts": 16, "per_device_train_batch_size": 8, "token_budget": -1,
    "dynamic_sampling": False, "max_staleness": 1000, "max_inflight_tasks": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def own_server(environment, tmp_path_factory) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server for these runs: its address and its process. Each sends it the weights that it starts with."""
    with serve(environment, tmp_path_factory.mktemp("server") / "server.txt") as served:
        yield served


@pytest.fixture
def url(own_server) -> str:
    """The address of a server that a run leaves alone."""
    return own_server[0]


def test_an_epoch_counts_prompts_and_a_checkpoint_resumes(environment, url, tmp_path):
    """TRL counts a prompt when its batch is put together, a step before it is trained."""
    passed = []
    for epochs, words in ((1, ()), (2, ("--resume",))):
        changes = SMALL | {"max_steps": -1, "num_train_epochs": epochs}
        training = start(tmp_path, url, changes, *words, environment=environment)
        assert training.wait(DEADLINE) == 0, (tmp_path / "output.txt").read_text()[-5000:]
        passed.append(logged(tmp_path)[-1]["passed"])
    assert passed[0] == 12
    assert passed[1] in (24, 25), "a checkpoint repeats prompts that ended after one that it had not trained"
    steps = logged(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert all(line["batch/samples_per_step"] == 8 for line in steps)
    assert steps[-1]["sample/staleness_max"] >= steps[-1]["sample/staleness_mean"] > 0


@pytest.mark.parametrize(("lost", "reason"), [("worker", " -9."), ("reward", "ValueError: the reward is broken.")])
def test_a_run_whose_worker_ends_ends_with_one_line(environment, url, tmp_path, lost, reason):
    changes = SMALL | {"broken": lost == "reward", "max_steps": 10_000}
    training = start(tmp_path, url, changes, environment=environment)
    if lost == "worker":
        until(lambda: len(logged(tmp_path)) > 1 or training.poll() is not None, poll=0.1)
        os.kill(logged(tmp_path)[-1]["worker"], signal.SIGKILL)
    assert reason in last_line(training, tmp_path)


def last_line(training, folder) -> str:
    """The line with which a run ends that has lost its rollouts."""
    since = time.monotonic()
    output = folder / "output.txt"
    assert training.wait(DEADLINE) == 1, output.read_text()[-5000:]
    print(f"{time.monotonic() - since:.1f} s to the end")
    last = output.read_text().splitlines()[-1]
    assert last.startswith("No more rollouts: ")
    assert last.endswith("resume_from_checkpoint=True).")
    return last


def test_the_reward_rises_until_the_server_is_killed(environment, own_server, tmp_path):
    """The last test of this server. The run ends with one line."""
    url, server = own_server
    training = start(tmp_path, url, {"max_steps": 10_000}, environment=environment)
    try:
        until(lambda: len(logged(tmp_path)) >= STEPS or training.poll() is not None, poll=0.5)
        steps = logged(tmp_path)[:STEPS]
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), (tmp_path / "output.txt").read_text()
        rewards = [step["reward"] for step in steps]
        print("rewards", rewards)
        # The rewards are those of the server's text, so it has the trainer's weights.
        assert fmean(rewards[-20:]) > fmean(rewards[:20]) + 0.1, rewards
        assert max(step["sample/staleness_max"] for step in steps) <= 4
        total = {name: sum(step.get(f"pods/{name}_total", 0) for step in steps) for name in COUNTED}
        assert total["kept_rollouts"] / 8 + total["dropped_groups"] == total["rollouts"] / 32 == total["groups"]
        os.killpg(server.pid, signal.SIGKILL)
        assert url in last_line(training, tmp_path)
    finally:
        training.kill()
