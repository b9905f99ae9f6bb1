"""verl's own trainer on the CPU, through the example: a real policy generates, is trained, and generates again.

Rows are selected over a batch of two prompts, and each prompt has an update of its own. A reference model needs a GPU.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pods_rl.runs import Run

from .. import DEADLINE
from .conftest import ROOT

STEPS = 3
PROMPTS = 2  # a step
N = 8
M = 4
VALIDATED = 32  # prompts of an evaluation
OVERRIDES = [
    "actor_rollout_ref.actor.optim.lr=0.01",  # each step changes the policy so much that old weights would show
    f"data.val_max_samples={VALIDATED}",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    f"data.train_batch_size={PROMPTS}",
    "trainer.v1.sampler.sampler_kwargs.selection=batch",
    "trainer.v1.sampler.sampler_kwargs.ledger_every=1",
    "trainer.resume_mode=auto",
]


def run_verl(place: Path, steps: int) -> Path:
    """Train to a step, from the last checkpoint if there is one; return the run directory."""
    output = place / f"to-{steps}"
    command = [sys.executable, str(ROOT / "examples" / "verl_cpu.py"), "--output", str(output), "--evals=1"]
    command += [f"--arms={N}:{M}", f"--steps={steps}", *OVERRIDES, f"trainer.save_freq={steps}"]
    command += [f"trainer.default_local_dir={place}/checkpoints", f"trainer.rollout_data_dir={place}/dump"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=output.parent)
    folder = output / f"pods-{N}-{M}"
    log = folder / "log.txt"
    assert done.returncode == 0, done.stderr + (log.read_text()[-5000:] if log.is_file() else "")
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder of a finished run."""
    return run_verl(tmp_path_factory.mktemp("whole"), STEPS)


def test_the_server_generates_with_the_weights_of_each_update(output):
    lines = (output / "verl.jsonl").read_text().splitlines()
    logged = {line["step"]: line["data"] for line in map(json.loads, lines)}
    for step in range(1, STEPS + 1):
        assert logged[step]["training/rollout_probs_diff_max"] < 1e-3
        assert logged[step]["training/off_policy/trajectory_staleness/max"] == 0
    # Adam moves each weight by about the learning rate, so old weights would give other probabilities
    assert any(logged[step]["actor/grad_norm"] > 0 for step in range(1, STEPS))


def test_the_run_directory_is_that_of_a_run(output):
    run = Run.open(output)
    assert {path.name for path in output.parents[1].iterdir()} == {"to-3", "checkpoints", "dump"}  # and nothing else
    assert run.state == "finished"
    assert run.step == STEPS
    assert [row["step"] for row in run.evals] == [0, STEPS]
    for row in run.evals:
        assert (row["prompts"], row["repeats"]) == (VALIDATED, 2)
        assert row["accuracy_se"] == pytest.approx(math.sqrt(row["accuracy"] * (1 - row["accuracy"]) / VALIDATED))
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert run.metrics[-1]["seconds"] == pytest.approx(run.seconds)
    assert (run.config["num_rollouts"], run.config["num_generations"]) == (N, M)


def check_trained_rows(output: Path, steps: range) -> None:
    """Compare verl's own dump of what it trained with the rows that the ledger has as selected."""
    for step in steps:
        rows = pq.read_table(output / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        kept = [(row["prompt"], row["completion"], row["reward"]) for row in rows if row["selected"]]
        dump = (output.parents[1] / "dump" / f"{step}.jsonl").read_text().splitlines()
        trained = [(line["input"], line["output"], line["score"]) for line in map(json.loads, dump)]
        assert len(rows) == PROMPTS * N
        assert len(kept) == PROMPTS * M
        assert sorted(kept) == sorted(trained)


def test_verl_trains_the_rows_that_the_ledger_has_as_selected(output):
    check_trained_rows(output, range(1, STEPS + 1))


@pytest.mark.reliability
def test_a_resumed_run_goes_on_after_the_last_checkpoint(output):
    resumed = run_verl(output.parents[1], STEPS + 1)
    assert [row["step"] for row in Run.open(resumed).metrics] == [STEPS + 1]
    check_trained_rows(resumed, range(STEPS + 1, STEPS + 2))
