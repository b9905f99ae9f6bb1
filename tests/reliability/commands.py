"""`pods` commands to be killed, stopped and starved: each in a process of its own, without loading torch each time.

A server imports torch and the rest once and forks for each command; the fork runs the real command line. It reads
requests from its standard input, one JSON line each, and ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import yaml

from pods_rl.runs import Run
from tests import DEADLINE, free_port

# The shipped policy, short completions, a checkpoint on each generation boundary: TRL's own resume is exact here.
RECIPE = {
    "model_name_or_path": "tiny", "num_generations": 2, "num_rollouts": 4, "per_device_train_batch_size": 2,
    "max_completion_length": 6, "learning_rate": 1e-3, "max_steps": 4, "save_steps": 1, "save_total_limit": 2,
    "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "eval_prompts": 0, "ledger_every": 0,
    "threads": 1, "task_train_size": 64, "task_test_size": 8, "seed": 5,
}  # fmt: skip
EXACT = (".safetensors", ".pt", ".pth", ".parquet")


def write_recipe(place: Path, **changes: object) -> None:
    """``r.yaml`` in a directory."""
    (place / "r.yaml").write_text(yaml.safe_dump(RECIPE | changes))


def outcome(run: Path) -> dict[str, object]:
    """What must be equal, to the last bit, in two runs that should be one: logs without times, files by their hash."""
    found = Run.open(run)
    files = sorted(path for path in run.rglob("*") if path.suffix in EXACT)
    return {
        "status": {key: found.status[key] for key in ("state", "reason", "step")},
        "metrics": [_without_times(row) for row in found.metrics],
        "evaluations": [_without_times(row) for row in found.evals],
        **{str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() for path in files},
        **{str(path.relative_to(run)): _state(path) for path in sorted(run.rglob("pods_state_*.json"))},
    }


def differences(expected: dict[str, object], found: dict[str, object]) -> list[str]:
    """The parts of two outcomes that are not equal."""
    missing = object()
    return [name for name in expected | found if expected.get(name, missing) != found.get(name, missing)]


def _state(path: Path) -> dict[str, object]:
    state = json.loads(path.read_text())
    return state | {"metrics": _without_times(state["metrics"])}


def _without_times(row: dict[str, object]) -> dict[str, object]:
    times = ("seconds", "elapsed", "due", "eval_seconds", "step_time", "speed_check")
    return {name: repr(x) for name, x in row.items() if name not in times and not name.startswith("pods/seconds/")}


@dataclass
class Command:
    """A running `pods` command; its words go to ``log``."""

    pid: int
    log: Path
    server: Server

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, negative for a signal that killed it."""
        return self.server.ask(wait=self.pid)

    def ended(self) -> bool:
        """Whether it is there no more (a zombie, until it is waited for)."""
        stat = Path(f"/proc/{self.pid}/stat")
        with contextlib.suppress(OSError):
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    def until(self, there: Callable[[], bool], poll: float = 0.0005) -> bool:
        """Wait until something is so; False where the command ended before."""
        deadline = time.monotonic() + DEADLINE
        while not there():
            if self.ended():
                return there()
            assert time.monotonic() < deadline, f"waited in vain for {there}: {self.log.read_text()}"
            time.sleep(poll)
        return True

    def slice(self, seconds: float) -> None:
        """Let it run for a moment, and hold it again."""
        self.kill(signal.SIGCONT)
        time.sleep(seconds)
        self.kill(signal.SIGSTOP)


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **request: object) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self.process.stdout.readline()))

    def start(
        self, *words: object, cwd: Path, log: str = "log", environment: Mapping[str, str] | None = None, **streams: str
    ) -> Command:
        """``stdout`` and ``stderr``: files to print to instead of the log."""
        path, given = cwd / log, {"environment": dict(environment or {}), "streams": streams}
        pid = self.ask(words=[str(word) for word in words], cwd=str(cwd), log=str(path), **given)
        return Command(pid, path, self)

    def start_ranks(self, *words: object, cwd: Path, environment: Mapping[str, str] | None = None) -> list[Command]:
        """Start two processes of one command, as a launcher starts them; each prints to `printed-RANK`."""
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank in range(2):
            path = cwd / f"printed-{rank}"
            path.touch()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **group, **(environment or {})}
            started.append(self.start(*words, cwd=cwd, log=f"log-{rank}", environment=own, stdout=str(path)))
        return started

    def run_ranks(self, *words: object, cwd: Path, environment: Mapping[str, str] | None = None) -> list[str]:
        """What each of two processes of one command prints; both must end well."""
        left = self.start_ranks(*words, cwd=cwd, environment=environment)
        try:
            while left:
                command = left.pop(0)
                assert command.wait() == 0, command.log.read_text()
        finally:
            for command in left:
                command.kill()
        return [(cwd / f"printed-{rank}").read_text() for rank in range(2)]

    def run(self, *words: object, cwd: Path, log: str = "log") -> tuple[int, str]:
        """Exit code and words of a command."""
        command = self.start(*words, cwd=cwd, log=log)
        return command.wait(), command.log.read_text()


@cache
def server() -> Server:
    """One for all tests of a process; it ends when that does."""
    return Server()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from pods_rl.cli.starter import import_all

    import_all()
    gc.freeze()  # no process looks at these for garbage
    for line in sys.stdin:
        request = json.loads(line)
        answer = _wait(request["wait"]) if "wait" in request else _fork(**request)
        answers.write(f"{answer}\n")
        answers.flush()


def _fork(
    words: list[str], cwd: str, log: str, streams: dict[str, str], environment: dict[str, str] | None = None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(streams[name], os.O_WRONLY) if name in streams else output for name in ("stdout", "stderr")]
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
    for name in ("stdout", "stderr"):  # those of the server know nothing of these files
        stream = open(getattr(sys, f"__{name}__").fileno(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell in the background, or nohup, ignores them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    os.environ |= environment or {}
    sys.argv = ["pods", *words]
    code = 1
    try:
        from pods_rl.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


def _wait(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 999  # hung


if __name__ == "__main__":
    _serve()
