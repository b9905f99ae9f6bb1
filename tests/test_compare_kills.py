"""`pods compare` as a person runs it, killed at bad moments: real processes, a tiny policy, two steps a run.

A run that must still be there when the next call looks for it is held meanwhile, so that no machine is too slow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pods_rl.runs import Run, find_runs, is_run

from . import DEADLINE, until

pytestmark = pytest.mark.slow

RUN = {
    "num_generations": 2, "num_rollouts": 4, "per_device_train_batch_size": 2, "max_completion_length": 6,
    "max_steps": 2, "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "threads": 1,
    "eval_prompts": 2, "task_test_size": 2, "ledger_every": 0,
}  # fmt: skip
# Python imports this at its start: a process that is to train waits there until the file is gone.
HOLDING = """
import sys, time
from pathlib import Path

hold = Path({hold!r})
if "train" in sys.orig_argv and hold.exists():
    hold.write_text("held")
    while hold.exists():
        time.sleep(0.02)
"""


@pytest.fixture
def place(tmp_path):
    """A directory with an experiment of two arms, a and b, in ``e.yaml``."""
    text = {"arms": {"a": {}, "b": {"rule": "random"}}, "base": {"model_name_or_path": "tiny", **RUN}}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(text))
    return tmp_path


def start(place: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pods_rl", "compare", "--config", "e.yaml", "--output", "out"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=place, text=True, env=os.environ | environment, **streams)


def waits_for_the_first_run(compare: subprocess.Popen[str]) -> bool:
    """Whether a call says so; it prints nothing more while that run is held."""
    assert compare.stdout is not None
    return any("a seed 1 waiting: another process is making it" in line for line in iter(compare.stdout.readline, ""))


def process_of(run: Path) -> int:
    """The process that makes a run, once it holds it and has said so."""

    def holder() -> list[str]:
        begun = is_run(run) and Run(run).state == "running"
        return re.findall(r"\d+", (run / ".lock").read_text()) if begun else []

    until(holder, lambda: (run / "log.txt").read_text() if run.exists() else "no directory")
    return int(holder()[0])


@pytest.mark.reliability
def test_compare_and_its_runs_may_be_killed_at_any_moment(place):
    """1: compare is killed, its run continues. 2: the next call waits for that run, its own next run is killed.
    3: the call after makes that run alone again."""
    first = start(place)
    left = process_of(place / "out/a/seed-1")
    os.kill(left, signal.SIGSTOP)
    first.kill()
    first.wait()

    second = start(place)
    assert waits_for_the_first_run(second)
    os.kill(left, signal.SIGCONT)
    os.kill(process_of(place / "out/b/seed-1"), signal.SIGKILL)
    output, errors = second.communicate(timeout=DEADLINE)
    assert second.returncode == 1, output + errors
    assert "a seed 1 finished" in output
    assert "Failed: b seed 1: killed by the system, perhaps out of memory" in errors
    states = {arm: runs[0].state for arm, runs in find_runs(place / "out").items()}
    assert states == {"a": "finished", "b": "failed"}
    assert (place / "out/report/report.html").is_file()  # of what there is

    third = start(place)
    output, errors = third.communicate(timeout=DEADLINE)
    assert third.returncode == 0, output + errors
    assert "a seed 1 skipped" in output
    assert "b seed 1 finished" in output
    assert [row["step"] for row in Run.open(place / "out/b/seed-1").metrics] == [1, 2]
    assert (
        Run.open(place / "out/.attempts/b-seed-1-1").status["reason"] == "killed by the system, perhaps out of memory"
    )


def test_a_run_that_had_only_begun_when_compare_was_killed_keeps_its_place_and_its_log(place):
    """Compare is killed while its run still loads torch, before the run has written anything: the next call waits."""
    (place / "e.yaml").write_text(yaml.safe_dump({"arms": {"a": {}}, "base": {"model_name_or_path": "tiny", **RUN}}))
    hold, log = place / "hold", place / "out/a/seed-1/log.txt"
    hold.touch()
    (place / "sitecustomize.py").write_text(HOLDING.format(hold=str(hold)))
    first = start(place, PYTHONPATH=str(place))
    try:
        until(hold.read_text)
        first.kill()
        first.wait()
        assert log.exists()
        assert not is_run(log.parent)
        second = start(place)
        assert waits_for_the_first_run(second), second.communicate()
    finally:
        hold.unlink()
    output, errors = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, output + errors
    assert "a seed 1 finished" in output
    assert not (place / "out/.attempts").exists()
    assert "step     2" in log.read_text()
