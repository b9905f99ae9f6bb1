"""One run of an experiment in a process of its own: which GPU it gets, where its words go, and how it is ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from ..distributed.signals import stop_on_signals
from ..errors import Interrupted
from ..runs.files import LOG, open_own

try:
    import fcntl
except ImportError:  # Windows: a run that a killed call left is then seen only once it holds its directory
    fcntl = None  # type: ignore[assignment]

in_progress: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Job:
    """A run to make: the recipe's file, the run's directory, and how it is started.

    ``accelerate``: the configuration to launch several processes with; None: one process.
    ``environment``: what it gets besides ours.
    """

    config: Path
    output: Path
    accelerate: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [*launcher(self.accelerate), "train", "--config", str(self.config), "--output", str(self.output)]


def launcher(accelerate: Path | None, processes: int | None = None) -> list[str]:
    """The words before `train`: this interpreter, or accelerate with a configuration and a number of its own."""
    words = [sys.executable]
    if accelerate is not None:
        words += ["-m", "pods_rl.distributed.launch", "--config_file", str(accelerate)]
        words += ["--num_processes", str(processes)] if processes is not None else []
    return [*words, "-m", "pods_rl"]


def train_in_process(job: Job) -> int:
    """`pods train` in a process of its own, its words in ``log.txt`` of the run's directory; its exit code.

    When we are interrupted the run is asked to end too: it saves itself after its step and we wait for it. A second
    interrupt ends it at once.
    """
    job.output.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop, stop.later():  # a signal does not part us from a process that is being started
        with open_own(job.output / LOG, "wb") as log:
            _lock(log)
            process = subprocess.Popen(
                job.command,
                env=child_environment(job.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return wait_for(process)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours and some more; no file of the user's poses as a module."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **extra}


def wait_for(process: subprocess.Popen[bytes], *, apart: bool = False) -> int:
    """Return a process's exit code. A signal asks it to end, a second SIGINT kills it; both raise Interrupted then.

    ``apart``: it is in a session of its own, so that a terminal's Ctrl-C reaches us alone.
    """
    in_progress.add(process)
    try:
        with stop_on_signals() as stop, stop.passed_to(partial(ask_to_end, process, apart=apart)):
            code = process.wait()
    finally:
        in_progress.discard(process)
    if stop.number is not None:
        raise Interrupted(stop.number)
    return code


def ask_to_end(process: subprocess.Popen[bytes], number: int, again: bool, *, apart: bool = False) -> None:
    """Pass a signal on; it may be called while another thread, or the code that a signal interrupts, waits for it."""
    if again and number == signal.SIGINT:
        _kill(process)
    elif apart:
        process.send_signal(number)
    else:  # not SIGINT, which a terminal has sent to the run already: twice means at once
        process.terminate()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process at once, with those it has started: a launcher's are in sessions of their own."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _lock(log: IO[bytes]) -> None:
    """Lock what a run prints to. The lock goes with the open file, which the run inherits, and so ends with the run
    rather than with us: it holds the run's place while that still loads torch, also where we are killed meanwhile."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_printing(run: Path) -> bool:
    """Whether a process that `train_in_process` started for a run's directory is still there, of whatever call."""
    if fcntl is None:
        return False
    try:
        with (run / LOG).open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none
        pass
    return False


def why(code: int, log: Path) -> str:
    """Why a run failed that did not say so in its status: its exit code, and the last line it printed."""
    if code in (-9, 137):
        return "killed by the system, perhaps out of memory"
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").split("\n")
    except OSError:
        lines = []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"exit code {code}: {last[:300]}" if last else f"exit code {code}"


def visible_gpus() -> list[str]:
    """The GPUs we may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without, or where it hides them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]
