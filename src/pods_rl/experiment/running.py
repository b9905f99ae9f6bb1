"""Make the runs of an experiment, each in its own process; a later call resumes an interrupted one.

A process per run gives every run the same clean state; a crash or an out-of-memory kill ends only one run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from signal import SIGTERM
from threading import Event as Flag
from threading import Lock
from typing import Literal

from ..distributed.signals import Stop, stop_on_signals
from ..errors import UserError
from ..recipe import check_accelerate, find_accelerate_config
from ..recipe.recipe import differences
from ..runs import Run, RunInUseError, RunWriter, end_run, is_run, write_atomic
from ..runs.files import begins_with, check_output
from ..yaml_files import parse_yaml
from .plan import HEAD, Experiment, PlannedRun
from .process import LOG, Job, ask_to_end, in_progress, train_in_process, visible_gpus, why

Kind = Literal["started", "skipped", "finished", "stopped", "failed"]
Launch = Callable[[Job], int]
_POLL = 1.0  # seconds between signals to runs that are asked to end


@dataclass(frozen=True)
class Event:
    """An event of a run, the ``position``-th of ``total``, counted from 1."""

    kind: Kind
    run: PlannedRun
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
    launch: Launch | None = None,
) -> dict[Kind, int]:
    """Make every run that is not finished yet, `parallel` at a time, and count how they ended.

    A run that failed or was stopped is repeated; its files are kept under ``.attempts/``. A failed run never stops
    the others. A run that another process still makes, as after a kill of an earlier call, counts as failed.

    Args:
        on_event: called as runs start and end, one call at a time.
        force: make finished runs again if their recipe has changed, rather than raise.
        parallel: runs at the same time, each on its own GPU if there are enough. On a CPU they share the cores:
            set ``threads``.
        launch: makes a run and returns the exit code; by default a `pods train`.

    Raises:
        UserError: a recipe is wrong, a finished run has another recipe, or another call is making this experiment;
            no run has started then.
        KeyboardInterrupt: after the runs in progress have saved themselves.
    """
    output, plan = Path(output), experiment.plan()
    _check(experiment, plan, output, parallel)
    with _hold(output):
        finished = {run.path for run in plan if _is_finished(output / run.path, run, force=force)}
        try:
            (output / "configs").mkdir(exist_ok=True)
            write_atomic(output / "experiment.yaml", experiment.to_yaml())
        except OSError as error:
            raise UserError(f"Cannot write to {output}: {error.strerror}. Choose another --output.") from error
        parallel = min(parallel, len(plan))
        runner = _Runner(experiment, output, on_event, launch or train_in_process, parallel)

        def make(position: int, run: PlannedRun) -> None:
            if run.path in finished:
                runner.report("skipped", position, run)
            else:
                runner.make(position, run)

        _make_all(list(enumerate(plan, start=1)), make, parallel, runner.stopping)
    return dict(runner.counts)


def _check(experiment: Experiment, plan: Sequence[PlannedRun], output: Path, parallel: int) -> None:
    """Raise UserError, before the first run starts, if the experiment cannot run."""
    if parallel < 1:
        raise UserError(f"parallel is {parallel}: expected 1 (one run after the other) or more.")
    if parallel > 1 and experiment.accelerate is not None:
        raise UserError(
            f"parallel is {parallel}, but each run takes {experiment.processes} processes "
            f"(accelerate: {experiment.accelerate}): remove --parallel."
        )
    for run in plan:
        run.recipe.check_installed()
        run.recipe.check_reachable()
        if experiment.accelerate is not None:
            check_accelerate(
                find_accelerate_config(experiment.accelerate), on_cpu=bool(run.recipe.values.get("use_cpu"))
            )
    if is_run(output):
        raise UserError(f"{output} holds a single run: choose another --output for an experiment.")
    stored = output / "experiment.yaml"
    if stored.exists() and not (stored.is_file() and begins_with(HEAD)(stored)):
        check_output(stored, "--output", inputs=[Path(experiment.source)], force=None)


@contextmanager
def _hold(output: Path) -> Iterator[None]:
    """Prevent other calls from making the same experiment; the system releases the lock when this process ends."""
    try:
        holder = RunWriter(output, resume=True)
    except RunInUseError as error:
        raise UserError(
            f"{output}: another `pods compare` is making this experiment. Wait for it, or choose another --output."
        ) from error
    with holder:
        yield


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
        self, experiment: Experiment, output: Path, on_event: Callable[[Event], None], launch: Launch, parallel: int
    ) -> None:
        self._output, self._on_event, self._launch = output, on_event, launch
        self._total = len(experiment.arms) * len(experiment.seeds)
        self._accelerate = find_accelerate_config(experiment.accelerate) if experiment.accelerate else None
        gpus = visible_gpus() if self._accelerate is None else []
        self._places: SimpleQueue[dict[str, str]] = SimpleQueue()  # the environment of each run in progress
        for place in range(parallel):
            self._places.put({"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {})
        self._reporting = Lock()
        self.counts: Counter[Kind] = Counter()
        self.stopping = Flag()

    def report(self, kind: Kind, position: int, run: PlannedRun, reason: str | None = None) -> None:
        with self._reporting:
            if kind != "started":
                self.counts[kind] += 1
            self._on_event(Event(kind, run, self._output / run.path, position, self._total, reason))

    def make(self, position: int, run: PlannedRun) -> None:
        """Make a run; an error is reported and ends only this run."""
        place, path = self._places.get(), self._output / run.path
        try:
            if is_run(path):
                RunWriter(path, resume=True).close()  # raises if another process makes it
            _set_aside(path, self._output / ".attempts")
            self.report("started", position, run)
            kind, reason = self._train(run, path, place)
        except OSError as error:
            kind, reason = "failed", f"cannot write {error.filename or self._output}: {error.strerror or error}"
        except UserError as error:
            kind, reason = "failed", str(error)
        finally:
            self._places.put(place)
        self.report(kind, position, run, reason)

    def _train(self, run: PlannedRun, path: Path, environment: dict[str, str]) -> tuple[Kind, str | None]:
        if self.stopping.is_set():
            raise KeyboardInterrupt
        config = self._output / "configs" / f"{run.arm}-seed-{run.seed}.yaml"
        write_atomic(config, run.recipe.to_yaml())
        try:
            code = self._launch(Job(config, path, self._accelerate, environment))
        except KeyboardInterrupt as interrupt:
            end_run(path, "stopped", str(interrupt) or "interrupted")
            raise
        stopped = self.stopping.is_set()
        end_run(path, "stopped" if stopped else "failed", "interrupted" if stopped else why(code, path / LOG))
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


def _make_all(
    runs: Sequence[tuple[int, PlannedRun]], make: Callable[[int, PlannedRun], None], parallel: int, stopping: Flag
) -> None:
    """Make the runs, `parallel` at a time; on an interrupt, those in progress save themselves and end."""
    if parallel == 1:
        for position, run in runs:
            make(position, run)
        return
    with ThreadPoolExecutor(parallel) as pool, stop_on_signals() as stop:
        futures = [pool.submit(make, position, run) for position, run in runs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopping.set()
            _end(futures, stop)
            raise


def _end(futures: Sequence[Future[None]], stop: Stop) -> None:
    """Start no more runs, and wait until those in progress have saved themselves; a second SIGINT kills them."""
    for future in futures:
        future.cancel()
    asked: set[object] = set()

    def pass_on(number: int, again: bool) -> None:
        for process in list(in_progress):
            if again or process not in asked:
                asked.add(process)
                ask_to_end(process, number, again)

    with stop.passed_to(pass_on):
        pass_on(SIGTERM, False)
        while wait(futures, timeout=_POLL).not_done:
            pass_on(SIGTERM, False)  # a run that started in the meantime
