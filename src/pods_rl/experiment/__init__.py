"""Experiments: arms x seeds over one base recipe, each run in its own process. A later call resumes an interrupted one.

A process per run gives every run the same clean state. A crash or an out-of-memory kill ends only one run.
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
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Literal

from ..distributed.signals import PARENT, Stop, how_it_ended, print_notice, stop_on_signals
from ..errors import UserError
from ..recipe import find_accelerate_config
from ..recipe.catalog import check_accelerate
from ..recipe.contents import Contents, contents_of, module_hashes
from ..recipe.recipe import differences
from ..runs import Run, RunInUseError, RunWriter, end_run, is_run, write_atomic
from ..runs.checkpoints import MANIFEST, last_good
from ..runs.files import CHECKPOINTS, EXPERIMENT, LOG, begins_with, open_own, read_mapping
from ..runs.identity import changed_contents
from .definition import HEAD, DeclaredPair, Experiment, PlannedRun, build_experiment, load_experiment
from .starters import RunProcess, Starters

__all__ = [
    "DeclaredPair",
    "Event",
    "Experiment",
    "PlannedRun",
    "Starters",
    "build_experiment",
    "load_experiment",
    "make_starters",
    "run_experiment",
]

Kind = Literal["started", "skipped", "finished", "stopped", "failed"]
_POLL = 1.0  # seconds between signals to runs that are asked to end
_ENDINGS = ("Error: ", "Stopped: ", "Fatal Python error: ", "terminate called ")  # of the last lines of a command
_LOG_END = 1 << 16  # bytes of a log that are read
_LAST_LINES = 10  # of a log, which begin with why a run ended: a message may have several lines
_LONGEST_ERROR = 300  # characters of an error
_in_progress: set[RunProcess] = set()


@dataclass(frozen=True)
class Event:
    """An event of a run, the ``position``-th of ``total``, counted from 1.

    ``reason`` says why a run stopped or failed. Of a run that starts it says how an earlier attempt is used; None if
    there was none.
    """

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
    starters: Starters | None = None,
) -> dict[Kind, int]:
    """Make every run that is not finished yet, `parallel` at a time, and return how many ended in each state.

    A run that failed, was stopped or was killed resumes from its last complete checkpoint. If it has none, or its
    recipe has changed, it starts again, and its files are kept under ``.attempts/``: runs of another recipe are moved
    there before the first run starts, so that the directory never holds runs of two experiments. A failed run never
    stops the others. If this process is killed, its runs end too. A run that another process makes counts as failed.

    Args:
        on_event: called as runs start and end, one call at a time, in other threads.
        force: make runs again rather than raise: finished ones whose recipe has changed, and finished or stopped ones
            if what their recipe names has changed (`recipe.contents`).
        parallel: runs at the same time, each on its own GPU if there are enough. On a CPU they share the cores:
            set ``threads``.
        starters: processes that fork the runs (`make_starters`), which saves each run its imports. Without them every
            run starts a new interpreter.

    Raises:
        UserError: a recipe is wrong, a run has another recipe or other contents, or another call is making this
            experiment; no run has started then.
        KeyboardInterrupt: a signal arrived, and the runs in progress have saved themselves.
    """
    output = Path(output)
    plan = experiment.plan()
    _check_startable(experiment, plan, output, parallel)
    try:
        holder = RunWriter(output, resume=True)  # the system releases its lock when this process ends
    except RunInUseError as error:
        raise UserError(
            f"{output}: another `pods compare` is making this experiment. Wait for it, or choose another --output."
        ) from error
    with holder:
        finished, outdated = _earlier_runs(plan, output, force=force)
        for path in outdated:
            with suppress(UserError, OSError):  # what prevents it is reported when the run's turn comes
                RunWriter(output / path, resume=True).close()  # raises if another process makes it
                _set_aside(output / path, output / ".attempts")
        (output / "configs").mkdir(exist_ok=True)
        write_atomic(output / EXPERIMENT, experiment.to_yaml())
        parallel = min(parallel, len(plan))
        runner = _Runner(experiment, output, on_event, parallel, finished, outdated, starters)
        with ThreadPoolExecutor(parallel) as pool, stop_on_signals() as stop:
            futures: list[Future[None]] = []
            try:
                # into the list one by one: a signal in between must find those that were submitted
                for position, run in enumerate(plan, start=1):
                    futures.append(pool.submit(runner.make, position, run))
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                runner.stopping = True
                _end_runs(futures, stop)
                raise
    return dict(runner.counts)


def make_starters(experiment: Experiment, parallel: int) -> Starters:
    """Return the processes that check an experiment and fork its runs; use them in a ``with`` statement."""
    is_safe = sys.platform == "linux" and experiment.accelerate is None and not visible_gpus()
    return Starters(min(parallel, len(experiment.arms) * len(experiment.seeds)), trains=is_safe)


def _check_startable(experiment: Experiment, plan: Sequence[PlannedRun], output: Path, parallel: int) -> None:
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
    stored = output / EXPERIMENT
    if stored.exists() and not (stored.is_file() and begins_with(stored, HEAD)):
        raise UserError(f"{stored} exists, and `pods compare` did not write it: choose another --output.")


def _earlier_runs(plan: Sequence[PlannedRun], output: Path, *, force: bool) -> tuple[set[Path], dict[Path, str]]:
    """Return the finished runs, and a note for each that starts again; raise UserError for results it would replace."""
    finished: set[Path] = set()
    outdated: dict[Path, str] = {}
    contents: dict[str, Contents] = {}  # by arm: its recipes differ in their seed only
    for run in plan:
        path = output / run.path
        if not is_run(path):
            continue
        is_finished = Run(path).state == "finished"
        changed_keys = differences(Run(path).config, run.recipe.values)
        if changed_keys:
            if is_finished and not force:
                listed = ", ".join(f"{key} (was {was}, now {now})" for key, (was, now) in changed_keys.items())
                raise UserError(
                    f"{path} is finished, with another recipe: {listed}. Choose another --output, or --force to make "
                    "it again."
                )
            outdated[run.path] = "starts again: its recipe has changed"
            continue
        if run.arm not in contents:
            contents[run.arm] = contents_of(run.recipe)
        environment = Run(path).environment
        now = contents[run.arm] | module_hashes(environment.get("sources"))
        changes = changed_contents(environment.get("contents"), now)
        if changes and not force and (is_finished or last_good(path / CHECKPOINTS, hashes=False)[0] is not None):
            raise UserError(
                f"{path} is {Run(path).state}, and what its recipe names has changed since: {', '.join(changes)}. "
                "Restore it, choose another --output, or --force to make such runs again."
            )
        if changes:
            outdated[run.path] = f"starts again: what its recipe names has changed: {', '.join(changes)}"
        elif is_finished:
            finished.add(run.path)
    return finished, outdated


class _Runner:
    """Makes runs, one at a time for each caller, and reports what happens to them."""

    def __init__(
        self,
        experiment: Experiment,
        output: Path,
        on_event: Callable[[Event], None],
        parallel: int,
        finished: set[Path],
        outdated: Mapping[Path, str],
        starters: Starters | None,
    ) -> None:
        self._starters = starters
        self._processes = experiment.processes
        self._output = output
        self._on_event = on_event
        self._finished = finished
        self._outdated = outdated
        self._total = len(experiment.arms) * len(experiment.seeds)
        self._accelerate = None if experiment.accelerate is None else find_accelerate_config(experiment.accelerate)
        gpus = [] if self._accelerate else visible_gpus()  # with accelerate, each run takes all GPUs
        self._environments: SimpleQueue[dict[str, str]] = SimpleQueue()  # those that no run in progress has
        for slot in range(parallel):
            self._environments.put({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {})
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
        path = self._output / run.path
        environment = self._environments.get()
        kind: Kind = "failed"  # unless it is trained
        reason: str | None
        try:
            if is_run(path):
                RunWriter(path, resume=True).close()  # raises if another process makes it
            resumes, note = _use_of_attempt(run, path, self._processes)
            if not resumes:
                _set_aside(path, self._output / ".attempts")
            self._report("started", position, run, note or self._outdated.get(run.path))
            kind, reason = self._train(run, path, environment, resumes)
        except OSError as error:
            reason = f"cannot write {error.filename or self._output}: {error.strerror or error}"
        except UserError as error:
            reason = str(error)
        finally:
            self._environments.put(environment)
        self._report(kind, position, run, reason)

    def _train(self, run: PlannedRun, path: Path, environment: dict[str, str], resume: bool) -> tuple[Kind, str | None]:
        config = self._output / "configs" / f"{run.arm}-seed-{run.seed}.yaml"
        write_atomic(config, run.recipe.to_yaml())
        earlier_status = Run(path).status
        log_before = 0  # bytes of an earlier attempt, whose error says nothing about this one
        if resume:
            with suppress(OSError):
                log_before = (path / LOG).stat().st_size
        if self._starters is not None and self._starters.trains:
            code = self._starters.train(config, path, _in_progress, resume=resume)
        else:
            code = train_in_process(config, path, self._accelerate, environment, resume=resume)
        reason = how_it_ended(code)
        error = _last_error(path / LOG, log_before)
        if error is not None:
            reason += f": {error}"
        # `end_run` changes nothing if the run has written how it ended.
        if self.stopping:
            end_run(path, "stopped", "interrupted")
        else:
            end_run(path, "failed", reason)
        status = Run(path).status
        if code and status == earlier_status and not self.stopping:
            return "failed", reason  # it ended before it trained, which leaves the earlier status
        kind: Kind = status["state"]
        return kind, (None if kind == "finished" else status.get("reason"))


def _use_of_attempt(run: PlannedRun, path: Path, processes: int) -> tuple[bool, str | None]:
    """Return whether a run resumes an earlier attempt in its directory, and a note if there is one."""
    if not is_run(path):
        return False, None
    if differences(Run(path).config, run.recipe.values):
        return False, "starts again: its recipe has changed"
    checkpoint, _ = last_good(path / CHECKPOINTS)
    if checkpoint is None:
        return False, "starts again: it has no complete checkpoint"
    if read_mapping(checkpoint / MANIFEST).get("processes", processes) != processes:
        return False, "starts again: its number of processes has changed"
    return True, f"resumes from {checkpoint.name}"


def _set_aside(path: Path, attempts: Path) -> None:
    """Move the files of an earlier attempt aside, under the first free number."""
    if not path.exists():
        return
    attempts.mkdir(exist_ok=True)
    name = f"{path.parent.name}-{path.name}"  # the arm and the seed
    number = 1
    while (attempts / f"{name}-{number}").exists():
        number += 1
    os.replace(path, attempts / f"{name}-{number}")


def train_in_process(
    config: Path, output: Path, accelerate: Path | None, environment: Mapping[str, str], *, resume: bool = False
) -> int:
    """Run `pods train` in its own process, which prints to ``log.txt`` of the run's directory; return the exit code."""
    words = ["train", "--config", str(config), "--output", str(output)]
    if accelerate is not None:
        words += ["--accelerate_config", str(accelerate)]
    if resume:
        words.append("--resume")
    output.mkdir(parents=True, exist_ok=True)
    with open_own(output / LOG, "ab" if resume else "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pods_rl", *words],
            # no file here shadows a module; a run that outlived this process would keep its directory locked
            env={**os.environ, "PYTHONSAFEPATH": "1", PARENT: str(os.getpid()), **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    _in_progress.add(process)
    try:
        return process.wait()
    finally:
        _in_progress.discard(process)


def _end_runs(futures: Sequence[Future[None]], stop: Stop) -> None:
    """Start no more runs, and wait until those in progress have saved themselves; a second SIGINT kills them."""
    import psutil

    from ..sandbox.worker import end_leader

    for future in futures:
        future.cancel()
    if _in_progress:
        print_notice("Each run in progress ends after its step. Another Ctrl-C ends it at once.")

    def pass_on(number: int, again: bool) -> None:
        for process in list(_in_progress):
            if again and number == signal.SIGINT:
                with suppress(psutil.NoSuchProcess):
                    end_leader(psutil.Process(process.pid))
            else:
                process.terminate()  # not SIGINT: a terminal has already sent it to the run, and a second one kills

    with stop.passed_to(pass_on):
        while wait(futures, timeout=_POLL).not_done:
            pass_on(signal.SIGTERM, False)  # again: a run may have started, or lost the first one


def _last_error(log: Path, begin: int) -> str | None:
    """Return the line that `pods` ends with, or the exception after a traceback, if a log ends with one of them."""
    if not log.is_file():  # opening a pipe would block
        return None
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - _LOG_END))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    lines = [line.rstrip() for line in lines if line.strip()]
    error = None
    in_traceback = False
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = not (number and lines[number - 1].startswith("Exception ignored"))
        elif line.startswith(_ENDINGS) or (in_traceback and not line[0].isspace()):
            in_traceback = False
            if len(lines) - number <= _LAST_LINES:  # otherwise the run went on after it
                error = line[:_LONGEST_ERROR]
    return error


def visible_gpus() -> list[str]:
    """Return the usable GPUs, named as in CUDA_VISIBLE_DEVICES; empty if there are none or it hides them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    # Not with torch, which takes seconds to import.
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(gpus))]
