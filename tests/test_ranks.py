"""Several processes of one run, as `pods train --num_processes 2` starts them: one raises, is killed or stalls."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from pods_rl.runs import Run

from . import until
from .test_evaluation_processes import RECIPE

ROOT = Path(__file__).parents[1]
RANK_RECIPE = RECIPE | {"num_generations": 4, "num_rollouts": 8, "eval_prompts": 0, "ledger_every": 0}


class Launched:
    """A `pods train` with two processes of its own."""

    def __init__(self, folder: Path, max_steps: int = 2, **keys: object) -> None:
        self.out, self.err, self.run = folder / "stdout.txt", folder / "stderr.txt", folder / "run"
        (folder / "r.yaml").write_text(yaml.safe_dump(RANK_RECIPE | keys))
        words = ["--config", str(folder / "r.yaml"), "--output", str(self.run), "--num_processes", "2"]
        words += ["--max_steps", str(max_steps)]  # a key of the command line reaches the processes
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pods_rl", "train", *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.family: set[psutil.Process] = set()

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait, and remember which processes there were."""

        def looked() -> bool:
            if self.process.poll() is None:
                self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            return happened()

        until(looked, self.said, poll=0.2)

    def end(self) -> int:
        """Wait for the end, and return the exit code. No process is left behind."""
        self.until(lambda: self.process.poll() is not None)
        self.until(lambda: not any(map(is_alive, self.family)))
        return int(self.process.returncode)

    def said(self) -> str:
        return self.err.read_text()


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start_one(**keys: object) -> Launched:
        started.append(Launched(tmp_path, **keys))
        return started[-1]

    yield start_one
    for one in started:
        for process in one.family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        one.process.kill()


@pytest.mark.reliability
def test_a_process_that_raises_ends_all_with_its_own_message(start):
    command = start(task_rewards={"tests.rank_faults:raises_on_one": 1.0})
    assert command.end() in (1, 2)  # 2 if the error of a reward counts as a user's mistake
    first = command.said().splitlines()[0]
    assert "process 1: " in first
    for noise in ("ChildFailedError", "gloo", "SIGTERM", "Warning"):
        assert noise not in command.said()
    status = Run(command.run).status
    assert (status["state"], status["reason"]) == ("failed", first.removeprefix("Error: "))


@pytest.mark.slow
def test_a_process_that_is_killed_ends_all(start):
    command = start(rule="tests.rank_faults:kills_one")
    assert command.end() == 1
    assert re.fullmatch(r"Error: process 1 .*\(SIGKILL\).*\n?", command.said())
    assert Run(command.run).state == "failed"


@pytest.mark.reliability
def test_a_process_that_stalls_ends_the_run_after_ddp_timeout(start):
    command = start(rule="tests.rank_faults:stalls_on_one", ddp_timeout=60)
    assert command.end() == 1
    assert "process 0: " in command.said()
    assert Run(command.run).state == "failed"


@pytest.mark.slow
def test_ctrl_c_ends_after_the_step_with_one_line(start):
    command = start(max_steps=100_000)
    command.until(lambda: len(Run(command.run).metrics) > 1 or command.process.poll() is not None)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130
    assert command.said().splitlines() == [
        "Interrupted by SIGINT: the processes end after this step and save a checkpoint. Another Ctrl-C ends them at "
        "once and loses the step.",
        f"Stopped: interrupted by SIGINT. Finished work is kept in {command.run}.",
    ]
    run = Run.open(command.run)
    assert run.state == "stopped"
    assert run.status["step"] == run.metrics[-1]["step"]
    assert (run.path / "checkpoints" / "final" / "model.safetensors").is_file()
    for line in command.out.read_text().splitlines():  # one process prints
        assert line.startswith(("run: ", "run  ", "  ")), line  # the second line of a step is indented


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed(start):
    """Nor do their own children: the workers of a reward and of the data loader."""
    reward = {"tests.rank_faults:counts": 1.0}
    command = start(max_steps=100_000, task_rewards=reward, dataloader_num_workers=1)

    def is_complete() -> bool:
        # Of each process: itself, a leader with its child, and a loader, which starts again in each epoch.
        return len(command.family) >= 6 and len(Run(command.run).metrics) > 1

    command.until(lambda: is_complete() or command.process.poll() is not None)
    assert command.process.poll() is None, command.said()
    command.process.kill()
    assert command.end() == -signal.SIGKILL
