"""Several processes of one run, as `pods train --num_processes 2` starts them: one raises, stalls, is killed, stopped.

Where the whole command would add nothing, `rank_faults` stands for it: processes that join and wait for each other.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from pods_rl.distributed.heartbeat import SILENT, Failure, Position, of_broken_collective, of_stall, overdue
from pods_rl.distributed.watch import _write_error_file
from pods_rl.experiment.process import launcher, wait_for
from pods_rl.recipe import find_accelerate_config
from pods_rl.runs import Run

from . import DEADLINE, free_port, until
from .test_evaluation_processes import RECIPE

ROOT = Path(__file__).parents[1]
PATIENCE = 60  # `ddp_timeout` of the run that stalls: two processes that only load never wait for so long
RANK_RECIPE = RECIPE | {"num_generations": 4, "num_rollouts": 7, "eval_prompts": 0, "ledger_every": 0}


class Launched:
    """A command with processes of its own."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
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
        """Wait for the end: the exit code. No process is left behind."""
        self.until(lambda: self.process.poll() is not None)
        assert self.family or self.process.returncode is not None
        self.until(lambda: not any(map(is_alive, self.family)))
        return int(self.process.returncode)

    def said(self) -> str:
        return self.err.read_text()

    def kill(self) -> None:
        for one in self.family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.kill()


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a command in a folder of its own; what is left of it at the end is killed."""
    started: list[Launched] = []

    def start_one(command: Callable[[Path], list[str]], **environment: str) -> tuple[Launched, Path]:
        folder = tmp_path_factory.mktemp("ranks")
        started.append(Launched(command(folder), folder, **environment))
        return started[-1], folder / "run"

    yield start_one
    for one in started:
        one.kill()


def pods_train(**keys: object) -> Callable[[Path], list[str]]:
    def command(folder: Path) -> list[str]:
        (folder / "r.yaml").write_text(yaml.safe_dump(RANK_RECIPE | keys))
        words = ["--config", str(folder / "r.yaml"), "--output", str(folder / "run"), "--num_processes", "2"]
        return [sys.executable, "-m", "pods_rl", "train", *words]

    return command


@pytest.fixture(scope="module")
def stalled(start):
    """A run whose process 1 never comes back from its rule; it waits for its limit while the other tests run."""
    return start(pods_train(rule="tests.rank_faults:stalls_on_one", ddp_timeout=PATIENCE))


# -- pods train -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_raises_ends_all_with_its_own_message_first(stalled, start):
    command, output = start(pods_train(task_rewards={"tests.rank_faults:raises_on_one": 1.0}))
    assert command.end() in (1, 2)  # 2 where a reward's error is told as a user's mistake
    first = command.said().splitlines()[0]
    assert first.startswith("Error: process 1: ")
    assert "no score for this one" in first
    for noise in ("ChildFailedError", "CalledProcessError", "gloo", "SIGTERM", "Warning"):
        assert noise not in command.said()
    assert command.said().count("Error: ") - command.said().count("ValueError: ") <= 1
    status = Run(output).status
    assert status["state"] == "failed"
    assert status["reason"] == first.removeprefix("Error: ")


@pytest.mark.slow
def test_ctrl_c_ends_after_the_step_and_says_so_in_a_line(start):
    command, output = start(pods_train(max_steps=100_000))
    command.until(lambda: len(Run(output).metrics) > 1)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 130
    assert command.said() == f"Stopped: interrupted by SIGINT. Finished work is kept in {output}.\n"
    run = Run.open(output)
    assert run.state == "stopped"
    assert run.status["step"] == run.metrics[-1]["step"]
    assert (run.path / "checkpoints" / "final" / "model.safetensors").is_file()
    for line in command.out.read_text().splitlines():  # one process speaks, and nothing else does
        assert line.startswith(("run: ", "run  "))


@pytest.mark.slow
def test_a_second_interrupt_ends_a_launcher_and_what_it_started(monkeypatch):
    """Of processes that heed nothing: one that has started another, in a session of its own."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    nested = [sys.executable, "-c", f"{deaf}; time.sleep(3600)"]
    code = f"import subprocess; subprocess.Popen({nested!r}, start_new_session=True); {deaf}; time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"deaf\n"] * 2
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    assert len(family) == 2
    ours, waiting, asked = threading.main_thread().ident, threading.Event(), threading.Event()
    wait, terminate = process.wait, process.terminate
    monkeypatch.setattr(process, "wait", lambda: (waiting.set(), wait())[1])
    monkeypatch.setattr(process, "terminate", lambda: (terminate(), asked.set()))

    def interrupt_twice() -> None:
        """The second comes once the first has been passed on, or the two would be one."""
        for heard in (waiting, asked):
            heard.wait()
            time.sleep(0.2)  # it really waits by now, on most machines
            signal.pthread_kill(ours, signal.SIGINT)

    # a shell leaves SIGINT ignored in what it starts in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt_twice, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for(process)
    finally:
        signal.signal(signal.SIGINT, before)
    assert psutil.wait_procs(family, timeout=DEADLINE)[1] == []


# -- the processes alone ----------------------------------------------------------------------------------------------


def stand_in(fault: str) -> Callable[[Path], list[str]]:
    def command(folder: Path) -> list[str]:
        (folder / "run").mkdir()
        words = launcher(find_accelerate_config("ddp"), 2)
        return [*words[:-1], "tests.rank_faults", fault, "--output", str(folder / "run")]

    return command


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_told_of_by_its_launcher(start, victim):
    command, output = start(stand_in("wait"))
    pids = [output / f"process-{rank}" for rank in range(2)]
    command.until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
    os.kill(int(pids[victim].read_text()), signal.SIGKILL)
    assert command.end() == 1
    reason = f"process {victim} was killed by signal 9 (SIGKILL), perhaps out of memory"
    assert command.said() == f"Error: {reason}\n"
    assert Run(output).status == {"state": "failed", "reason": reason, "step": 3, "seconds": 0, "elapsed": 0}


@pytest.mark.slow
def test_a_launcher_that_is_stopped_when_its_run_has_finished_says_so_too(start):
    """The signal kills process 1, which has not come to its end: the exit code is that of the status all the same."""
    command, output = start(stand_in("finish"))
    assert command.end() == 0, command.said()
    assert Run(output).state == "finished"


@pytest.mark.slow
def test_without_our_launcher_the_processes_end_each_other(start):
    places: list[Path] = []

    def command(folder: Path) -> list[str]:
        places[:] = places or [folder / "run"]
        places[0].mkdir(exist_ok=True)
        return [sys.executable, "-m", "tests.rank_faults", "refuse", "--output", str(places[0])]

    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [start(command, RANK=str(rank), LOCAL_RANK=str(rank), **common)[0] for rank in range(2)]
    assert [one.end() for one in both] == [2, 2]
    reason = "process 1: Nothing to train on. Put some there."
    assert [one.said() for one in both] == [f"Error: {reason}\n", ""]
    assert Run(places[0]).status["reason"] == reason


@pytest.mark.slow
def test_a_process_that_stalls_is_named_when_the_limit_passes(stalled):
    command, output = stalled
    assert command.end() == 1
    (line,) = command.said().splitlines()
    assert line.startswith("Error: process 1 has been in rule tests.rank_faults:stalls_on_one of step 1 for ")
    assert "at stalls_on_one (rank_faults.py:" in line
    assert "; process 0 waited " in line
    assert f"longer than ddp_timeout = {PATIENCE} s" in line
    assert Run(output).status["reason"] == line.removeprefix("Error: ")


def test_what_we_take_of_torchs_launcher():
    """The handler it installs for each signal, by this name; the file a process leaves its reason in."""
    assert "signal.signal(sig, _terminate_process_handler)" in inspect.getsource(api.PContext.start)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in inspect.getsource(LaunchConfig)


def test_torchs_launcher_reads_our_reason(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    _write_error_file(Failure(1, "process 1: ValueError: no"))
    assert ProcessFailure(local_rank=1, pid=5, exitcode=1, error_file=str(file)).message == "process 1: ValueError: no"


# -- who is late ------------------------------------------------------------------------------------------------------


def at(marks: int, since: float, *, busy: bool = False, seen: float = 1000.0) -> Position:
    return Position(marks, 7, "update", busy, since, seen, "step (train.py:9)")


@pytest.mark.parametrize(
    ("own", "others", "late"),
    [
        (at(9, 300), {1: at(8, 200)}, 1),
        (at(9, 500), {1: at(8, 200)}, None),  # not for so long yet
        (at(9, 300, busy=True), {1: at(8, 200)}, None),  # it waits for nobody
        (at(9, 300), {1: at(9, 200), 2: at(10, 200)}, None),  # nobody is behind
        (at(9, 300), {1: at(8, 200), 2: at(7, 250), 3: at(7, 250)}, 2),  # the furthest
        (at(9, 300), {1: at(9, 200, seen=1000 - SILENT - 1)}, 1),  # stopped where the others wait
        (at(9, 300), {1: at(9, 200, seen=900), 2: at(8, 200)}, 2),  # behind counts more than silent
    ],
)
def test_who_is_late(own, others, late):
    assert overdue(own, others, limit=600) == late


def test_a_process_that_says_nothing_is_told_so():
    said = of_stall(1, at(8, 200, seen=900), 0, at(9, 300), 600).reason
    assert said.startswith(
        "process 1 has been in update of step 7 for 800 s, at step (train.py:9), without a heartbeat"
    )
    assert "heartbeat for 100 s; process 0 waited 700 s for it, longer than ddp_timeout = 600 s" in said


def test_a_collective_that_broke_for_no_known_reason_tells_where_each_is():
    error = RuntimeError("[gloo] Timed out\nmore")
    failure = of_broken_collective(error, 0, at(9, 300), {1: at(9, 300)})
    assert failure.reason == "process 0 lost contact in update of step 7: [gloo] Timed out"
    assert failure.details == "".join(f"process {k}: in update of step 7, at step (train.py:9)\n" for k in range(2))
