"""Make the runs of an experiment, each in its own process; a later call resumes an interrupted one.

A process per run gives every run the same clean state; a crash or an out-of-memory kill ends only one run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Literal

from ..distributed.signals import Stop, stop_on_signals
from ..errors import UserError
from ..recipe.catalog import check_accelerate, find_accelerate_config
from ..recipe.recipe import differences
from ..runs import Run, RunInUseError, RunWriter, end_run, is_run, write_atomic
from ..runs.files import LOG, begins_with, open_own
from ..yaml_files import parse_yaml
from .plan import HEAD, Experiment, PlannedRun

Kind = Literal["started", "skipped", "finished", "stopped", "failed"]
Launch = Callable[["Job"], int]
_POLL = 1.0  # seconds between signals to runs that are asked to end
_in_progress: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Event:
    """An event of a run, the ``position``-th of ``total``, counted from 1."""

    kind: Kind
    run: PlannedRun
    path: Path
    position: int
    total: int
    reason: str | None = None


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


def run_experiment(
    experiment: Experiment,
    output: str | Path,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    force: bool = False,
    parallel: int = 1,
    launch: Launch | None = None,
) -> dict[Kind, int]:
    """Make every run that is not finished yet, `parallel` at a time, and count how they ended.

    A run that failed or was stopped is repeated; its files are kept under ``.attempts/``. A failed run never stops
    the others. A run that another process still makes, as after a kill of an earlier call, counts as failed.

    Args:
        on_event: called as runs start and end, one call at a time, in other threads.
        force: make finished runs again if their recipe has changed, rather than raise.
        parallel: runs at the same time, each on its own GPU if there are enough. On a CPU they share the cores:
            set ``threads``.
        launch: makes a run and returns the exit code; by default a `pods train`. Called in other threads.

    Raises:
        UserError: a recipe is wrong, a finished run has another recipe, or another call is making this experiment;
            no run has started then.
        KeyboardInterrupt: a signal arrived, and the runs in progress have saved themselves.
    """
    output, plan = Path(output), experiment.plan()
    _check(experiment, plan, output, parallel)
    try:
        holder = RunWriter(output, resume=True)  # the system releases its lock when this process ends
    except RunInUseError as error:
        raise UserError(
            f"{output}: another `pods compare` is making this experiment. Wait for it, or choose another --output."
        ) from error
    with holder:
        finished = {run.path for run in plan if _is_finished(output / run.path, run, force=force)}
        (output / "configs").mkdir(exist_ok=True)
        write_atomic(output / "experiment.yaml", experiment.to_yaml())
        parallel = min(parallel, len(plan))
        runner = _Runner(experiment, output, on_event, launch or train_in_process, parallel, finished)
        with ThreadPoolExecutor(parallel) as pool, stop_on_signals() as stop:
            futures: list[Future[None]] = []
            try:
                futures.extend(pool.submit(runner.make, position, run) for position, run in enumerate(plan, start=1))
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                runner.stopping = True
                _end(futures, stop)
                raise
    return dict(runner.counts)


def _check(experiment: Experiment, plan: Sequence[PlannedRun], output: Path, parallel: int) -> None:
    """Raise UserError, before the first run starts, if the experiment cannot run."""
    if parallel > 1 and experiment.accelerate is not None:
        raise UserError(
            f"parallel is {parallel}, but each run takes {experiment.processes} processes "
            f"(accelerate: {experiment.accelerate}): remove --parallel."
        )
    for run in plan:
        run.recipe.check_reachable()
    if experiment.accelerate:
        check_accelerate(find_accelerate_config(experiment.accelerate))
    if is_run(output):
        raise UserError(f"{output} holds a single run: choose another --output for an experiment.")
    stored = output / "experiment.yaml"
    if stored.exists() and not (stored.is_file() and begins_with(HEAD)(stored)):
        raise UserError(f"{stored} exists, and `pods compare` did not write it: choose another --output.")


def _is_finished(path: Path, run: PlannedRun, *, force: bool) -> bool:
    """Return whether a run is finished; raise UserError if it finished with another recipe."""
    if not is_run(path) or Run(path).state != "finished":
        return False
    wanted, _ = parse_yaml(run.recipe.to_yaml(), run.recipe.source)
    changed = differences(Run(path).config, wanted)
    if changed and not force:
        was = ", ".join(f"{key} (was {was}, now {now})" for key, (was, now) in changed.items())
        raise UserError(
            f"{path} is finished, with another recipe: {was}. Choose another --output, or --force to make it again."
        )
    return not changed


class _Runner:
    """Makes runs, one at a time for each caller, and reports what happens to them."""

    def __init__(
        self,
        experiment: Experiment,
        output: Path,
        on_event: Callable[[Event], None],
        launch: Launch,
        parallel: int,
        finished: set[Path],
    ) -> None:
        self._output, self._on_event, self._launch, self._finished = output, on_event, launch, finished
        self._total = len(experiment.arms) * len(experiment.seeds)
        self._accelerate = find_accelerate_config(experiment.accelerate) if experiment.accelerate else None
        gpus = visible_gpus() if self._accelerate is None else []
        self._places: SimpleQueue[dict[str, str]] = SimpleQueue()  # the environment of each run in progress
        for place in range(parallel):
            self._places.put({"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {})
        self._reporting = Lock()
        self.counts: Counter[Kind] = Counter()
        self.stopping = False

    def _report(self, kind: Kind, position: int, run: PlannedRun, reason: str | None = None) -> None:
        with self._reporting:
            if kind != "started":
                self.counts[kind] += 1
            self._on_event(Event(kind, run, self._output / run.path, position, self._total, reason))

    def make(self, position: int, run: PlannedRun) -> None:
        """Make a run that is not finished; an error is reported and ends only this run."""
        if run.path in self._finished:
            self._report("skipped", position, run)
            return
        place, path = self._places.get(), self._output / run.path
        try:
            if is_run(path):
                RunWriter(path, resume=True).close()  # raises if another process makes it
            _set_aside(path, self._output / ".attempts")
            self._report("started", position, run)
            kind, reason = self._train(run, path, place)
        except OSError as error:
            kind, reason = "failed", f"cannot write {error.filename or self._output}: {error.strerror or error}"
        except UserError as error:
            kind, reason = "failed", str(error)
        finally:
            self._places.put(place)
        self._report(kind, position, run, reason)

    def _train(self, run: PlannedRun, path: Path, environment: dict[str, str]) -> tuple[Kind, str | None]:
        config = self._output / "configs" / f"{run.arm}-seed-{run.seed}.yaml"
        write_atomic(config, run.recipe.to_yaml())
        code = self._launch(Job(config, path, self._accelerate, environment))
        ended = ("stopped", "interrupted") if self.stopping else ("failed", _why(code, path / LOG))
        end_run(path, *ended)  # unless it has written how it ended
        status = Run(path).status
        kind: Kind = status["state"]
        return kind, status.get("reason") if kind != "finished" else None


def _set_aside(path: Path, attempts: Path) -> None:
    """Move the files of an earlier attempt aside, under the first free number."""
    if path.exists():
        attempts.mkdir(exist_ok=True)
        number = 1
        while (kept := attempts / f"{path.parent.name}-{path.name}-{number}").exists():
            number += 1
        os.replace(path, kept)


def train_in_process(job: Job) -> int:
    """Run `pods train` in its own process, which prints to ``log.txt`` of the run's directory; return the exit code."""
    job.output.mkdir(parents=True, exist_ok=True)
    with open_own(job.output / LOG, "wb") as log:
        process = subprocess.Popen(
            job.command,
            env={**os.environ, "PYTHONSAFEPATH": "1", **job.environment},  # no file here shadows a module
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    _in_progress.add(process)
    try:
        return process.wait()
    finally:
        _in_progress.discard(process)


def _end(futures: Sequence[Future[None]], stop: Stop) -> None:
    """Start no more runs, and wait until those in progress have saved themselves; a second SIGINT kills them."""
    for future in futures:
        future.cancel()
    asked: set[object] = set()

    def pass_on(number: int, again: bool) -> None:
        for process in list(_in_progress):
            if again and number == signal.SIGINT:
                _kill(process)
            elif again or process not in asked:
                asked.add(process)
                process.terminate()  # not SIGINT: a terminal has already sent it to the run, and a second one kills

    with stop.passed_to(pass_on):
        while wait(futures, timeout=_POLL).not_done:
            pass_on(signal.SIGTERM, False)  # a run that started in the meantime


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those it started, which may have their own sessions."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _why(code: int, log: Path) -> str:
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
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, _ in enumerate(line for line in done.stdout.splitlines() if line.startswith("GPU "))]
