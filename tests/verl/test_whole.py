"""verl's own trainer on the CPU, through the example: a real policy generates, is trained, and generates again."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from pods_rl.runs import Run

from .. import DEADLINE
from .conftest import ROOT

STEPS = 3
N = 8
M = 4
VALIDATED = 32  # prompts of an evaluation
OVERRIDES = [
    "actor_rollout_ref.actor.optim.lr=0.01",  # each step changes the policy so much that old weights would show
    f"data.val_max_samples={VALIDATED}",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    command = [sys.executable, str(ROOT / "examples" / "verl_cpu.py"), "--output", str(folder), "--evals=1"]
    command += [f"--arms={N}:{M}", f"--steps={STEPS}", *OVERRIDES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=folder)
    output = folder / f"pods-{N}-{M}"
    log = output / "log.txt"
    assert done.returncode == 0, done.stderr + (log.read_text()[-5000:] if log.is_file() else "")
    return output


@pytest.fixture(scope="module")
def logged(output):
    """What verl itself logged of each step."""
    lines = (output / "verl.jsonl").read_text().splitlines()
    return {line["step"]: line["data"] for line in map(json.loads, lines)}


def test_each_step_generates_n_and_trains_m(logged):
    assert sorted(logged) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert logged[step]["pods/all/rows"] == N
        assert logged[step]["pods/selected/rows"] == M


def test_the_server_generates_with_the_weights_of_each_update(logged):
    for step in range(1, STEPS + 1):
        assert logged[step]["training/rollout_probs_diff_max"] < 1e-3
        assert logged[step]["training/off_policy/trajectory_staleness/max"] == 0
    # Adam moves each weight by about the learning rate, so old weights would give other probabilities
    assert any(logged[step]["actor/grad_norm"] > 0 for step in range(1, STEPS))


def test_the_run_directory_is_that_of_a_run(output):
    run = Run.open(output)
    assert list(output.parent.iterdir()) == [output]  # nothing in the working directory
    assert run.state == "finished"
    assert run.step == STEPS
    assert [row["step"] for row in run.evals] == [0, STEPS]
    for row in run.evals:
        assert (row["prompts"], row["repeats"]) == (VALIDATED, 2)
        assert row["accuracy_se"] == pytest.approx(math.sqrt(row["accuracy"] * (1 - row["accuracy"]) / VALIDATED))
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert run.metrics[-1]["seconds"] == pytest.approx(run.seconds)
    assert (run.config["num_rollouts"], run.config["num_generations"]) == (N, M)
