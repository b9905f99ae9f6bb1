"""One run in its own process: its GPU, its output, and its end."""

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

from ..distributed.signals import stop_on_signals
from ..errors import Interrupted
from ..runs.files import LOG, open_own

in_progress: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Job:
    """A run to start: the recipe's file, the run's directory, its launcher and environment.

    ``accelerate``: the configuration to launch several processes with; None: one process.
    ``environment``: variables to add to those of this process.
    """

    config: Path
    output: Path
    accelerate: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        words = ["train", "--config", str(self.config), "--output", str(self.output)]
        if self.accelerate is not None:
            words += ["--accelerate_config", str(self.accelerate)]
        return [sys.executable, "-m", "pods_rl", *words]


def train_in_process(job: Job) -> int:
    """Run `pods train` in its own process, which prints to ``log.txt`` of the run's directory; return the exit code.

    A signal asks the run to end: it saves itself after its step while this call waits. A second SIGINT kills it. Both
    then raise Interrupted.
    """
    job.output.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop, stop.later():  # a signal must not detach a process that is starting
        with open_own(job.output / LOG, "wb") as log:
            process = subprocess.Popen(
                job.command,
                env={**os.environ, "PYTHONSAFEPATH": "1", **job.environment},  # no file here shadows a module
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        in_progress.add(process)
        try:
            with stop.passed_to(partial(ask_to_end, process)):
                code = process.wait()
        finally:
            in_progress.discard(process)
    if stop.number is not None:
        raise Interrupted(stop.number)
    return code


def ask_to_end(process: subprocess.Popen[bytes], number: int, again: bool) -> None:
    """Pass a signal on; safe while another thread, or the code that a signal interrupts, waits for the process."""
    if again and number == signal.SIGINT:
        _kill(process)
    else:  # not SIGINT: a terminal has already sent it to the run, and a second one kills
        process.terminate()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those it started, which may have their own sessions."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def why(code: int, log: Path) -> str:
    """Return why a run without a reason in its status failed: its exit code, and the last line it printed."""
    if code in (-9, 137):
        return "killed by the system, perhaps out of memory"
    lines: list[str] = []
    with suppress(OSError):
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"exit code {code}: {last[:300]}" if last else f"exit code {code}"


def visible_gpus() -> list[str]:
    """Return the usable GPUs, named as in CUDA_VISIBLE_DEVICES; empty if there are none or it hides them."""
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
