"""Make the runs of an experiment, each in a process of its own, and go on where an earlier call stopped.

A process per run keeps runs alike (the same clean state) and apart (a crash, or a kill for want of memory,
costs one run).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
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
from ..recipe.reading import parse_yaml
from ..recipe.recipe import differences
from ..runs import Run, RunInUseError, RunWriter, end_run, is_run, write_atomic
from .plan import Experiment, Planned
from .process import LOG, Job, ask_to_end, in_progress, is_printing, train_in_process, visible_gpus, why

Kind = Literal["started", "waiting", "skipped", "finished", "stopped", "failed"]
Launch = Callable[[Job], int]
_POLL = 1.0  # seconds between looks at a run that another process is making


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
    launch: Launch | None = None,
) -> dict[Kind, int]:
    """Make every run that is not finished yet, `parallel` at a time, and count what came of them.

    A run that failed or was stopped is made again; what it left is kept under ``.attempts/``. A failed run never
    stops the others. A run that is still being made, as after a kill of an earlier call, is waited for.

    Args:
        on_event: called as runs start and end, one call at a time.
        force: make finished runs again where their recipe has changed, rather than refuse.
        parallel: runs made side by side, each on a GPU of its own where there are as many. On a CPU they share the
            cores, so give each its own (``threads``).
        launch: makes a run and returns the exit code; by default a `pods train`.

    Raises:
        UserError: a recipe is wrong, a finished run has another recipe, or another call is making this experiment;
            nothing has started then.
        KeyboardInterrupt: after the runs in progress have saved themselves.
    """
    if parallel < 1:
        raise UserError(f"parallel is {parallel}: expected 1 (one run after the other) or more.")
    if parallel > 1 and experiment.accelerate is not None:
        raise UserError(
            f"parallel is {parallel}, but each run takes {experiment.processes} processes "
            f"(accelerate: {experiment.accelerate}): leave --parallel out."
        )
    output, plan = Path(output), experiment.plan()
    parallel = min(parallel, len(plan))
    for run in plan:
        run.recipe.check_installed()
        run.recipe.check_reachable()
        if experiment.accelerate is not None:
            check_accelerate(
                find_accelerate_config(experiment.accelerate), on_cpu=bool(run.recipe.values.get("use_cpu"))
            )
    if is_run(output):
        raise UserError(f"{output} holds a single run: choose another --output for an experiment.")
    with _hold(output):
        found = {run.path: _found(output / run.path, run, force=force) for run in plan}
        try:
            (output / "configs").mkdir(exist_ok=True)
            write_atomic(output / "experiment.yaml", experiment.to_yaml())
        except OSError as error:
            raise UserError(f"Cannot write to {output}: {error.strerror}. Choose another --output.") from error
        making = _Making(experiment, output, len(plan), on_event, launch or train_in_process, parallel)

        def make(position: int, run: Planned) -> None:
            if found[run.path] == "finished":
                making.tell("skipped", position, run)
            else:
                making.make(position, run, force=force)

        numbered = list(enumerate(plan, start=1))
        numbered.sort(key=lambda item: found[item[1].path] != "in use")  # those take a place already
        _work_off(numbered, make, parallel, making.stopping)
    return dict(making.counts)


class _Making:
    """Makes one run at a time for each of its callers, and tells what comes of it."""

    def __init__(
        self,
        experiment: Experiment,
        output: Path,
        total: int,
        on_event: Callable[[Event], None],
        launch: Launch,
        parallel: int,
    ) -> None:
        self._output, self._total, self._on_event, self._launch = output, total, on_event, launch
        self._accelerate = find_accelerate_config(experiment.accelerate) if experiment.accelerate else None
        gpus = visible_gpus() if self._accelerate is None else []
        self._places: SimpleQueue[dict[str, str]] = SimpleQueue()
        for place in range(parallel):
            self._places.put({"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {})
        self._telling = Lock()
        self.counts: Counter[Kind] = Counter()
        self.stopping = Flag()

    def tell(self, kind: Kind, position: int, run: Planned, reason: str | None = None) -> None:
        with self._telling:
            if kind not in ("started", "waiting"):
                self.counts[kind] += 1
            self._on_event(Event(kind, run, self._output / run.path, position, self._total, reason))

    def make(self, position: int, run: Planned, *, force: bool) -> None:
        """Make a run, or wait for the process that is making it; what goes wrong is told and costs this run alone."""
        place = self._places.get()
        try:
            kind, reason = self._make(position, run, place, force=force)
        except OSError as error:
            kind, reason = "failed", f"cannot write {error.filename or self._output}: {error.strerror or error}"
        except UserError as error:
            kind, reason = "failed", str(error)
        finally:
            self._places.put(place)
        self.tell(kind, position, run, reason)

    def _make(self, position: int, run: Planned, place: dict[str, str], *, force: bool) -> tuple[Kind, str | None]:
        path = self._output / run.path
        while True:
            if self._wait_for_others(position, run) and _found(path, run, force=force) == "finished":
                return "finished", None
            _set_aside(path, self._output)
            self.tell("started", position, run)
            try:
                return self._train(run, place)
            except RunInUseError:  # a process that an earlier call left had begun, but not yet taken its place
                continue

    def _wait_for_others(self, position: int, run: Planned) -> bool:
        """Whether another process was making the run; it has ended by now."""
        path = self._output / run.path
        if not _is_in_use(path):
            return False
        self.tell("waiting", position, run, "another process is making it")
        while _is_in_use(path):
            if self.stopping.wait(_POLL):
                raise KeyboardInterrupt
        return True

    def _train(self, run: Planned, environment: dict[str, str]) -> tuple[Kind, str | None]:
        if self.stopping.is_set():
            raise KeyboardInterrupt
        config, path = self._output / "configs" / f"{run.arm}-seed-{run.seed}.yaml", self._output / run.path
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


def _work_off(
    waiting: Sequence[tuple[int, Planned]], make: Callable[[int, Planned], None], parallel: int, stopping: Flag
) -> None:
    """Make the runs, `parallel` at a time; an interrupt asks those in progress to save themselves and end."""
    if parallel == 1:
        for position, run in waiting:
            make(position, run)
        return
    with ThreadPoolExecutor(parallel) as pool, stop_on_signals() as stop:
        futures = [pool.submit(make, position, run) for position, run in waiting]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopping.set()
            _end(futures, stop)
            raise


def _end(futures: Sequence[Future[None]], stop: Stop) -> None:
    """Start no more runs, and wait until those in progress have saved themselves; a second SIGINT ends them at once."""
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
            pass_on(SIGTERM, False)  # a run that was being started meanwhile


@contextmanager
def _hold(output: Path) -> Iterator[None]:
    """Keep other calls from making the same experiment; the lock goes with our process, however it ends."""
    try:
        holder = RunWriter(output, resume=True)
    except RunInUseError as error:
        raise UserError(
            f"{output}: another `pods compare` is making this experiment. Wait for it, or choose another --output."
        ) from error
    with holder:
        yield


def _found(path: Path, run: Planned, *, force: bool) -> Literal["finished", "in use", "to do"]:
    """What there is of a run; raises UserError where it is finished, but was made of another recipe."""
    if _is_in_use(path):
        return "in use"
    if not is_run(path):
        return "to do"
    found = Run(path)
    if found.state != "finished":
        return "to do"
    wanted, _ = parse_yaml(run.recipe.to_yaml(), run.recipe.source)
    changed = differences(found.config, wanted)
    if changed and not force:
        was = ", ".join(f"{key} (was {was}, now {now})" for key, (was, now) in changed.items())
        raise UserError(
            f"{path} is finished, with another recipe: {was}. Choose another --output, or --force to make it again."
        )
    return "to do" if changed else "finished"


def _is_in_use(path: Path) -> bool:
    """Whether another process is making the run, or has begun to."""
    if is_printing(path):
        return True
    if not is_run(path):
        return False
    try:
        RunWriter(path, resume=True).close()
    except RunInUseError:
        return True
    return False


def _set_aside(path: Path, output: Path) -> None:
    """Keep what an earlier attempt left, under the first free number."""
    if not path.exists():
        return
    attempts = output / ".attempts"
    attempts.mkdir(exist_ok=True)
    number = 1
    while (attempts / f"{path.parent.name}-{path.name}-{number}").exists():
        number += 1
    with suppress(FileNotFoundError):
        os.replace(path, attempts / f"{path.parent.name}-{path.name}-{number}")
