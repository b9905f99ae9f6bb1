"""`pods compare` as a person runs it, killed at bad moments: real processes, a tiny policy, a few steps a run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from pods_rl.runs import Run, is_run

from . import DEADLINE, until
from .reliability.commands import outcome

pytestmark = pytest.mark.slow

RUN = {
    "num_generations": 2, "num_rollouts": 4, "per_device_train_batch_size": 2, "max_completion_length": 6,
    "max_steps": 2, "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "threads": 1,
    "eval_prompts": 2, "task_test_size": 2, "ledger_every": 0,
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """A directory with an experiment of two arms, a and b, in ``e.yaml``."""
    text = {"arms": {"a": {}, "b": {"rule": "random"}}, "base": {"model_name_or_path": "tiny", **RUN}}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(text))
    return tmp_path


def start(place: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pods_rl", "compare", "--config", "e.yaml", "--output", "out"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=place, text=True, **streams)


def process_of(run: Path) -> int:
    """The process that makes a run, once it holds it and has said so."""

    def holder() -> list[str]:
        begun = is_run(run) and Run(run).state == "running"
        return re.findall(r"\d+", (run / ".lock").read_text()) if begun else []

    until(holder, lambda: (run / "log.txt").read_text() if run.exists() else "no directory")
    return int(holder()[0])


@pytest.mark.reliability
def test_compare_and_its_runs_may_be_killed_at_any_moment(place):
    """1: compare is killed, and its run ends with it. 2: the next call repeats that run; its second run is killed.
    3: the call after repeats that run alone."""
    first = start(place)
    run = psutil.Process(process_of(place / "out/a/seed-1"))
    first.kill()
    first.wait()
    until(lambda: not run.is_running() or run.status() == psutil.STATUS_ZOMBIE)

    second = start(place)
    os.kill(process_of(place / "out/b/seed-1"), signal.SIGKILL)
    output, errors = second.communicate(timeout=DEADLINE)
    assert second.returncode == 1, output + errors
    assert "a seed 1 finished" in output
    assert re.search(r"b seed 1: .*\(SIGKILL\)", errors)

    third = start(place)
    output, errors = third.communicate(timeout=DEADLINE)
    assert third.returncode == 0, output + errors
    assert "a seed 1 skipped" in output
    assert "b seed 1 finished" in output
    assert (place / "out/report/report.html").is_file()
    assert [row["step"] for row in Run.open(place / "out/b/seed-1").metrics] == [1, 2]
    assert "(SIGKILL)" in Run.open(place / "out/.attempts/b-seed-1-1").status["reason"]


def test_a_forked_run_is_the_run_of_a_fresh_process(place):
    """`pods compare` forks both runs from one process. `pods train` gives the records and weights of the second."""
    process = start(place)
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output + errors
    words = ["train", "--config", "out/configs/b-seed-1.yaml", "--output", "alone"]
    subprocess.run([sys.executable, "-m", "pods_rl", *words], cwd=place, check=True, capture_output=True)
    forked = outcome(place / "out/b/seed-1")
    alone = outcome(place / "alone")
    for part in ("metrics", "evaluations", "checkpoints/final/model.safetensors"):
        assert forked[part] == alone[part]
