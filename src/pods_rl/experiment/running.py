"""Make the runs of an experiment, each in a process of its own, and go on where an earlier call stopped.

A process per run keeps runs alike (the same clean state) and apart (a crash, or a kill for want of memory,
costs one run).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Literal

from ..errors import UserError
from ..recipe.reading import parse_yaml
from ..runs import Run, RunWriter, is_run, write_atomic
from .plan import Experiment, Planned

Kind = Literal["started", "skipped", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Event:
    """What happened to a run: ``position`` of ``total``, counted from 1."""

    kind: Kind
    run: Planned
    path: Path
    position: int
    total: int
    reason: str | None = None


def run_experiment(
    experiment: Experiment,
    output: str | Path,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    force: bool = False,
    parallel: int = 1,
    launch: Callable[[Path, Path], int] | None = None,
) -> dict[Kind, int]:
    """Make every run that is not finished yet, `parallel` at a time, and count what came of them.

    A run that failed or was stopped is made again; what it left is kept under ``.attempts/``. A failed run
    never stops the others.

    Args:
        on_event: called as runs start and end, one call at a time.
        force: make finished runs again where their recipe has changed, rather than refuse.
        parallel: runs made side by side. They share the machine, so give each its own cores (``threads``).
        launch: trains a recipe's file into a directory and returns the exit code; by default a `pods train`.

    Raises:
        UserError: a recipe is wrong, or a finished run has another recipe; nothing has started then.
        KeyboardInterrupt: after the runs in progress have saved themselves.
    """
    if parallel < 1:
        raise UserError(f"parallel is {parallel}: expected 1 (one run after the other) or more.")
    output = Path(output)
    plan = experiment.plan()
    finished = {run.path: _is_finished(output / run.path, run, force=force) for run in plan}
    try:
        (output / "configs").mkdir(parents=True, exist_ok=True)
        write_atomic(output / "experiment.yaml", experiment.to_yaml())
    except OSError as error:
        raise UserError(f"Cannot write to {output}: {error.strerror}. Choose another --output.") from error
    counts: Counter[Kind] = Counter()
    telling = Lock()

    def tell(kind: Kind, position: int, run: Planned, reason: str | None = None) -> None:
        with telling:
            if kind != "started":
                counts[kind] += 1
            on_event(Event(kind, run, output / run.path, position, len(plan), reason))

    if launch is None:
        launch = train_in_process if parallel == 1 else partial(train_in_process, plain=True)

    def make(position: int, run: Planned) -> None:
        if finished[run.path]:
            tell("skipped", position, run)
            return
        _set_aside(output / run.path, output)
        tell("started", position, run)
        kind, reason = _make(run, output, launch)
        tell(kind, position, run, reason)

    _work_off(list(enumerate(plan, start=1)), make, parallel)
    return dict(counts)


def _work_off(waiting: Sequence[tuple[int, Planned]], make: Callable[[int, Planned], None], parallel: int) -> None:
    """Make the runs, `parallel` at a time; an interrupt asks those in progress to save themselves and end."""
    if parallel == 1:
        for position, run in waiting:
            make(position, run)
        return
    with ThreadPoolExecutor(parallel) as pool, _termination_as_interrupt():
        futures = [pool.submit(make, position, run) for position, run in waiting]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(_in_progress):
                process.terminate()
            raise


_in_progress: set[subprocess.Popen[bytes]] = set()


def train_in_process(config: Path, output: Path, *, plain: bool = False) -> int:
    """`pods train` in a process of its own that shares our terminal; its exit code.

    `plain` keeps it from redrawing lines, for runs that print side by side.

    When we are interrupted the run is asked to end too: it saves itself after its step and we wait for it. A second
    interrupt ends it at once.
    """
    command = [sys.executable, "-m", "pods_rl", "train", "--config", str(config), "--output", str(output)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # a file of the user's must not stand in for a module
    if plain:
        environment["TERM"] = "dumb"
    process = subprocess.Popen(command, env=environment)
    _in_progress.add(process)
    with _termination_as_interrupt():
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()  # not SIGINT: a terminal has sent that to the run already, and twice means at once
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
                process.wait()
            raise
        finally:
            _in_progress.discard(process)


def _make(run: Planned, output: Path, launch: Callable[[Path, Path], int]) -> tuple[Kind, str | None]:
    config = output / "configs" / f"{run.arm}-seed-{run.seed}.yaml"
    write_atomic(config, run.recipe.to_yaml())
    path = output / run.path
    try:
        code = launch(config, path)
    except KeyboardInterrupt:
        _close(path, "stopped", "interrupted")
        raise
    reason = "killed by the system, perhaps out of memory" if code in (-9, 137) else f"exit code {code}"
    _close(path, "failed", reason)
    status = Run(path).status
    kind: Kind = status["state"]
    return kind, status.get("reason") if kind != "finished" else None


def _close(path: Path, state: Kind, reason: str) -> None:
    """Say how a run ended that had no time to say so itself."""
    found = Run(path)
    if found.state not in ("finished", "stopped", "failed"):
        with RunWriter(path, resume=True) as writer:
            kept = {key: found.status.get(key) or 0 for key in ("step", "seconds", "elapsed")}
            writer.write_status(state, reason=reason, **kept)


def _is_finished(path: Path, run: Planned, *, force: bool) -> bool:
    """Whether a run is there and done; raises UserError where it is in use, or was made of another recipe."""
    if not is_run(path):
        return False
    found = Run(path)
    RunWriter(path, resume=True).close()  # in use? then it says so
    if found.state != "finished":
        return False
    wanted, _ = parse_yaml(run.recipe.to_yaml(), run.recipe.source)
    changed = [key for key in {**wanted, **found.config} if wanted.get(key) != found.config.get(key)]
    if changed and not force:
        was = ", ".join(f"{key} (was {found.config.get(key)}, now {wanted.get(key)})" for key in changed)
        raise UserError(
            f"{path} is finished, with another recipe: {was}. Choose another --output, or --force to make it again."
        )
    return not changed


def _set_aside(path: Path, output: Path) -> None:
    if path.exists():
        attempts = output / ".attempts"
        attempts.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in attempts.glob(f"{path.parent.name}-{path.name}-*"))
        os.replace(path, attempts / f"{path.parent.name}-{path.name}-{number}")


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    try:
        before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    except ValueError:  # not the main thread, where no handler can be set
        before = {}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
