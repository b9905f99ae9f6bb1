"""`pods compare` as a person runs it, killed at bad moments: real processes, a tiny policy, two steps a run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from pods_rl.runs import Run, find_runs, is_run
from pods_rl.runs.checkpoints import last_good

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
    return subprocess.Popen(command, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def process_of(run: Path) -> int:
    """The process that makes a run, once it holds it and has said so."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if is_run(run) and Run(run).state == "running" and (held := re.search(r"\d+", (run / ".lock").read_text())):
            return int(held[0])
        time.sleep(0.02)
    raise AssertionError(f"{run} never began: {(run / 'log.txt').read_text() if run.exists() else 'no directory'}")


@pytest.mark.reliability
def test_compare_and_its_runs_may_be_killed_at_any_moment(place):
    """1: compare is killed, its run continues. 2: the next call waits for that run, its own next run is killed.
    3: the call after makes that run alone again."""
    first = start(place)
    left = process_of(place / "out/a/seed-1")
    first.kill()
    first.wait()
    os.kill(left, 0)  # still there

    second = start(place)
    os.kill(process_of(place / "out/b/seed-1"), signal.SIGKILL)
    output, errors = second.communicate(timeout=240)
    assert second.returncode == 1, output + errors
    assert "a seed 1 waiting: another process is making it" in output
    assert "a seed 1 finished" in output
    assert "Failed: b seed 1: killed by the system, perhaps out of memory" in errors
    states = {arm: runs[0].state for arm, runs in find_runs(place / "out").items()}
    assert states == {"a": "finished", "b": "failed"}
    assert (place / "out/report/report.html").is_file()  # of what there is

    third = start(place)
    output, errors = third.communicate(timeout=240)
    assert third.returncode == 0, output + errors
    assert "a seed 1 skipped" in output
    assert "b seed 1 finished" in output
    assert [row["step"] for row in Run.open(place / "out/b/seed-1").metrics] == [1, 2]
    assert (
        Run.open(place / "out/.attempts/b-seed-1-1").status["reason"] == "killed by the system, perhaps out of memory"
    )


def test_a_run_that_had_only_begun_when_compare_was_killed_keeps_its_place_and_its_log(place):
    """Compare is killed while its run still loads torch, before the run has written anything: the next call waits."""
    first = start(place)
    log, compare = place / "out/a/seed-1/log.txt", psutil.Process(first.pid)
    while not (log.exists() and compare.children()):
        assert first.poll() is None
        time.sleep(0.005)
    first.kill()
    first.wait()
    assert not is_run(log.parent), "too late: the run has begun to write"

    second = start(place)
    output, errors = second.communicate(timeout=240)
    assert second.returncode == 0, output + errors
    assert "a seed 1 waiting: another process is making it" in output
    assert "a seed 1 finished" in output
    assert not (place / "out/.attempts").exists()
    assert "step     2" in log.read_text()


@pytest.mark.reliability
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)])
def test_a_signal_to_compare_has_its_run_save_itself(place, number, code):
    text = yaml.safe_load((place / "e.yaml").read_text())
    text["base"]["max_steps"] = 100_000
    (place / "e.yaml").write_text(yaml.safe_dump(text))
    command, run = start(place), place / "out/a/seed-1"
    process_of(run)
    deadline = time.monotonic() + 120
    while not Run(run).metrics:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    command.send_signal(number)
    _, errors = command.communicate(timeout=240)
    assert command.returncode == code, errors
    assert "Stopped. Finished work is kept in out; the same command resumes from there." in errors
    assert (Run(run).state, Run(run).status["reason"]) == ("stopped", "interrupted by SIGTERM")
    good, passed = last_good(run / "checkpoints")
    assert (good.name, passed) == (f"checkpoint-{len(Run(run).metrics)}", [])
    assert not (place / "out/b").exists()
