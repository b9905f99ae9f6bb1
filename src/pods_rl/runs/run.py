"""Read a run, find the runs of an experiment, and write a run directory with one writer at a time."""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from ..errors import UserError
from ..masking import mask_secrets
from . import files, speed
from .checkpoints import find_checkpoints
from .files import finite_number, open_own, read_jsonl, read_mapping, step_of, to_json, write_atomic, write_parquet
from .identity import TOKEN, token_of
from .processes import has_ended, this_process

try:
    import fcntl
except ImportError:  # Windows has no fcntl: a second writer is not detected there
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_MOMENT = ("step", "due", "seconds", "elapsed", speed.FIELD)  # the fields of an evaluation that say when it was


class Run:
    """A snapshot of a run directory; each file is read once, on first use.

    A missing file counts as empty. A line truncated by a kill is skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped: dict[str, list[int]] = {files.METRICS: [], files.EVALS: []}  # lines, once the file is read

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Return the run at ``path``; raise UserError if there is none."""
        path = Path(path)
        if not is_run(path):
            problem = "is not a run directory" if path.is_dir() else "does not exist"
            raise UserError(
                f"{path} {problem}: expected a directory with {files.CONFIG} or {files.STATUS}, as `pods train` writes "
                "it."
            )
        return cls(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_mapping(self.path / files.CONFIG)

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_mapping(self.path / files.ENVIRONMENT)

    @cached_property
    def status(self) -> dict[str, Any]:
        return read_mapping(self.path / files.STATUS)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / files.METRICS, self.skipped[files.METRICS]))

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        """The evaluations. The lines of several evaluation sets at one step are one evaluation (`_join_sets`)."""
        return _join_sets(list(read_jsonl(self.path / files.EVALS, self.skipped[files.EVALS])))

    @property
    def state(self) -> str:
        """running, finished, stopped or failed; killed if the process of a running one has ended on this machine.

        ``unknown`` if status.json is missing or damaged.
        """
        state = str(self.status.get("state", "unknown"))
        if state == "running" and has_ended(self.status.get("process")):
            return "killed"
        return state

    @property
    def step(self) -> int:
        """The step in the status."""
        return int(finite_number(self.status.get("step")))

    @property
    def seconds(self) -> float:
        """The training clock at that step."""
        return finite_number(self.status.get("seconds"))

    @property
    def elapsed(self) -> float:
        """The wall clock at that step."""
        return finite_number(self.status.get("elapsed"))

    @property
    def seed(self) -> int | None:
        """The seed of the recipe, or the k of a directory called ``seed-<k>``."""
        seed = self.config.get("seed")
        if isinstance(seed, int):
            return seed
        match = re.fullmatch(r"seed-(\d+)", self.path.name)
        return int(match[1]) if match else None

    @property
    def arm(self) -> str | None:
        """The arm, of a run of an experiment: ``<experiment>/<arm>/seed-<k>``."""
        path = _real(self.path)
        return path.parent.name if re.fullmatch(r"seed-\d+", path.name) else None

    @property
    def name(self) -> str:
        """The directory's name; of a run of an experiment ``<experiment>-<arm>-seed-<k>``."""
        path = _real(self.path)
        folders = (path.parent.parent.name, path.parent.name) if self.arm else ()
        return "-".join(filter(None, (*folders, path.name)))

    def rollout_files(self) -> list[Path]:
        """The files of the ledger, by step."""
        return _step_files(self.path / files.ROLLOUTS)

    def evaluation_files(self) -> list[Path]:
        """The completions of each evaluation, by step."""
        return _step_files(self.path / files.EVALUATIONS)

    def checkpoints(self) -> list[Path]:
        """TRL's checkpoints, by step, without ``final/``."""
        return find_checkpoints(self.path / files.CHECKPOINTS)

    @property
    def final_checkpoint(self) -> Path | None:
        path = self.path / files.CHECKPOINTS / "final"
        return path if path.is_dir() else None


def _join_sets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of `evals.jsonl` with those of several evaluation sets at one step joined into one.

    The fields of a set are called ``<set>/<field>``. ``reward`` is the mean over the sets, if all were evaluated.

    >>> rows = [{"step": 4, "due": 2.0, "set": name, "reward": reward} for name, reward in (("a", 0.5), ("b", 1.0))]
    >>> _join_sets(rows)
    [{'step': 4, 'due': 2.0, 'a/reward': 0.5, 'b/reward': 1.0, 'reward': 0.75}]
    """
    names = dict.fromkeys(str(row["set"]) for row in rows if "set" in row)
    joined: list[dict[str, Any]] = []
    for row in rows:
        if "set" not in row:
            joined.append(row)
            continue
        # The first set of an evaluation begins a line, which the other sets of the same step join.
        if not joined or "step" not in row or joined[-1].get("step") != row["step"]:
            joined.append({name: row[name] for name in _MOMENT if name in row})
        for name, value in row.items():
            if name not in (*_MOMENT, "set"):
                joined[-1][f"{row['set']}/{name}"] = value
    for row in joined if names else ():
        rewards = [row.get(f"{name}/reward") for name in names]
        if all(isinstance(reward, (int, float)) for reward in rewards):
            row["reward"] = sum(map(finite_number, rewards)) / len(rewards)
    return joined


def _step_files(folder: Path) -> list[Path]:
    """Return all entries of a folder that are named after a step, by step; a report names those that are not files."""
    return sorted(folder.glob("step-*.parquet"), key=step_of)


def _real(path: Path) -> Path:
    """Return the path without links; a loop of links, at which ``Path.resolve`` raises, stays as it is."""
    return Path(os.path.realpath(path))


def is_run(path: str | Path) -> bool:
    """Return whether a directory holds a run, even one that has just started."""
    return any((Path(path) / name).is_file() for name in (files.CONFIG, files.STATUS))


def find_runs(experiment_dir: str | Path) -> dict[str, list[Run]]:
    """Return every run below a directory, by arm: ``<arm>/seed-<k>/``, ``<run>/``, or the directory itself.

    Hidden directories, where an experiment keeps earlier attempts, are skipped. If ``experiment.yaml`` declares arms
    and seeds, only these runs are returned, since others are of an earlier experiment (`undeclared_runs`). Arms are in
    the order of ``experiment.yaml`` if there is one, else by name; runs by seed.
    """
    declared, _ = _split_runs(Path(experiment_dir))
    return declared


def undeclared_runs(experiment_dir: str | Path) -> dict[str, list[Run]]:
    """Return the runs below an experiment's directory that its ``experiment.yaml`` does not declare, by folder.

    They are of arms that were renamed or removed, or of seeds that were dropped.
    """
    _, others = _split_runs(Path(experiment_dir))
    return dict(sorted(others.items()))


def _split_runs(root: Path) -> tuple[dict[str, list[Run]], dict[str, list[Run]]]:
    """Return the runs below a directory that belong to its experiment, all if it declares no seeds, and the others."""
    found = _all_runs(root)
    if is_run(root):
        return found, {}
    arms, seeds = _declared(root)
    declared: dict[str, list[Run]] = {}
    others: dict[str, list[Run]] = {}
    for name in dict.fromkeys((*arms, *found)):
        for run in found.get(name, ()):
            if seeds is None or (name in arms and run.path.name in [f"seed-{seed}" for seed in seeds]):
                declared.setdefault(name, []).append(run)
            else:
                others.setdefault(name, []).append(run)
    return declared, others


def _all_runs(root: Path) -> dict[str, list[Run]]:
    """Return every run below a directory by the name of its folder."""
    if not root.is_dir():
        raise UserError(f"{root} does not exist: expected a directory written by `pods compare` or `pods train`.")
    if is_run(root):
        return {_real(root).name: [Run(root)]}
    arms: dict[str, list[Run]] = {}
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        paths = [folder] if is_run(folder) else [path for path in folder.iterdir() if is_run(path)]
        if paths:
            by_seed = sorted(paths, key=lambda path: (step_of(path), path.name))
            arms[folder.name] = [Run(path) for path in by_seed]
    return arms


def _declared(root: Path) -> tuple[list[str], list[Any] | None]:
    """Return the arms and the seeds of ``experiment.yaml``: no arms without a readable file, None without seeds."""
    settings = read_mapping(root / files.EXPERIMENT)
    arms = settings.get("arms")
    seeds = settings.get("seeds")
    if not isinstance(arms, Mapping):
        return [], None
    return [str(arm) for arm in arms], seeds if isinstance(seeds, list) else None


def not_begun(experiment_dir: str | Path) -> list[str]:
    """Return the runs that ``experiment.yaml`` declares and that have no files yet, as ``<arm>/seed-<k>``."""
    arms, seeds = _declared(Path(experiment_dir))
    runs = [f"{arm}/seed-{seed}" for arm in arms for seed in seeds or ()]
    return [run for run in runs if not is_run(Path(experiment_dir) / run)]


class RunInUseError(UserError):
    """Another process, or another writer in this process, has locked the run."""


def check_unused(path: str | Path) -> None:
    """Raise UserError if a directory holds a run already."""
    if is_run(Path(path)):
        raise UserError(
            f"{path} already holds a run ({Run(Path(path)).state}). Choose another directory with "
            "--output, or continue it with --resume."
        )


class RunWriter:
    """Writes one run directory and locks it: a second writer is refused until ``close``.

    ``resume=True`` continues the run in the directory; else a directory that holds a run is refused.
    Use as a context manager. Numbers that are not finite are written as null.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._files: dict[str, IO[str]] = {}
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path)
        except OSError as error:
            raise UserError(f"Cannot write to {self.path}: {error.strerror}. Choose another directory.") from error
        # Only under the lock, so that no two processes can both find the directory unused.
        if not resume:
            try:
                check_unused(self.path)
            except UserError:
                self.close()
                raise

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # the disk is full, which was reported when the line was written
                file.close()
        self._files.clear()
        with suppress(OSError):
            if self._made and os.listdir(self.path) == [_LOCK]:  # the run never began
                (self.path / _LOCK).unlink()
                self.path.rmdir()
        self._lock.close()

    def check(self) -> None:
        """Raise UserError if the directory, or a file that this appends to, was moved or deleted meanwhile."""
        for name, file in {_LOCK: self._lock, **self._files}.items():
            path = self.path / name
            try:
                # Another file may have the name by now, and the open one still takes what is written.
                is_ours = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                is_ours = False
            if not is_ours:
                raise UserError(
                    f"{path} was moved, deleted or replaced while the run was writing it. The run ends here: put it "
                    "back, and resume from the last checkpoint."
                )

    def write_config(self, text: str) -> None:
        """Write ``Recipe.to_yaml()`` as ``config.yaml``."""
        write_atomic(self.path / files.CONFIG, text)

    def write_environment(self, environment: Mapping[str, Any], token: str = "") -> str:
        """Write ``environment.json``; return the run's token: its own, else this one, or a new one."""
        kept = token_of(self.path) or token or uuid4().hex
        self._write_json(files.ENVIRONMENT, {**environment, TOKEN: kept})
        return kept

    def add_to_environment(self, values: Mapping[str, Any]) -> None:
        """Add values to ``environment.json``, or replace them."""
        self._write_json(files.ENVIRONMENT, read_mapping(self.path / files.ENVIRONMENT) | dict(values))

    def write_status(self, state: str, *, reason: str | None = None, **clocks: float) -> None:
        """Write ``status.json``.

        Args:
            state: running, finished, stopped or failed.
            reason: why the run is in this state. Passwords and tokens in it are masked.
            clocks: the number of steps made (`step`), the training clock (`seconds`) and the wall clock (`elapsed`).
                One that is not given stays as the last status has it.
        """
        run = Run(self.path)
        last = {"step": run.step, "seconds": run.seconds, "elapsed": run.elapsed}
        status = {"state": state, "reason": mask_secrets(reason), **last, **clocks}
        if state == "running":
            status["process"] = this_process()
        self._write_json(files.STATUS, status)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self._append(files.METRICS, row)

    def append_eval(self, row: Mapping[str, Any]) -> None:
        self._append(files.EVALS, row)

    def write_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
        """Write a parquet file with a row per rollout of a step; every column has the same length."""
        return write_parquet(self.path / files.ROLLOUTS / f"step-{step:06d}.parquet", columns)

    def write_evaluation(self, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
        """Write a parquet file with a row per completion of the evaluation after a step, replacing an earlier one."""
        return write_parquet(self.path / files.EVALUATIONS / f"step-{step:06d}.parquet", columns)

    def clear(self) -> None:
        """Remove what this class wrote of an earlier run: the status last, which says that there was one."""
        self.rewind(-1, 0)
        for name in (files.METRICS, files.EVALS, files.CONFIG, files.ENVIRONMENT, files.STATUS):
            (self.path / name).unlink(missing_ok=True)

    def rewind(self, step: int, evaluations: int) -> None:
        """Remove records after ``step``, all but the first ``evaluations``, and torn lines, so that it can resume."""
        self._keep(files.METRICS, step)
        evaluated_steps = self._keep(files.EVALS, step, evaluations)
        run = Run(self.path)
        for path in run.rollout_files():
            if step_of(path) > step:
                _remove_record(path)
        for path in run.evaluation_files():
            if step_of(path) not in evaluated_steps:
                _remove_record(path)

    def _keep(self, name: str, step: int, most: int | None = None) -> set[float]:
        """Keep the rows of a file up to a step, among its first ``most``; return their steps."""
        path = self.path / name
        if not path.exists():
            return set()
        kept_lines: list[str] = []
        kept_steps: set[float] = set()
        for row in islice(read_jsonl(path), most):
            row_step = finite_number(row.get("step"), -1)
            if row_step <= step:
                kept_lines.append(to_json(row) + "\n")
                kept_steps.add(row_step)
        # A file that is open for appending would still write to the replaced one.
        if name in self._files:
            self._files.pop(name).close()
        write_atomic(path, "".join(kept_lines))
        return kept_steps

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = open_own(self.path / name, "a")
        self._files[name].write(to_json(row) + "\n")

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        write_atomic(self.path / name, to_json(values, indent=2) + "\n")


def _remove_record(path: Path) -> None:
    """Remove a file of a step that we wrote; any other file of the folder is the user's."""
    if path.is_file() and re.fullmatch(r"step-\d{6,}\.parquet", path.name):
        path.unlink()


def end_run(path: str | Path, state: str, reason: str) -> bool:
    """Write the final status of a run that could not write it itself; return False if it has already ended.

    Call it after the end of the process that the run was started with. That one may be a launcher, whose processes
    end a moment later. Raises RunInUseError if the run is still being written after half a minute.
    """
    if Run(Path(path)).state in ("finished", "stopped", "failed"):
        return False
    deadline = time.monotonic() + 30  # the last threads of a killed run end, and give its lock back
    while True:
        try:
            with RunWriter(path, resume=True) as writer:
                writer.write_status(state, reason=reason, **last_clocks(path))
            return True
        except RunInUseError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def last_clocks(path: str | Path) -> dict[str, float]:
    """Return the step and the clocks of the last line of metrics, for `RunWriter.write_status`.

    A run that ends early has not written them into its status. Empty if the status is as far.
    """
    row = files.last_row(Path(path) / files.METRICS)
    step = int(finite_number(row.get("step")))
    if step <= Run(Path(path)).step:
        return {}
    return {"step": step, "seconds": finite_number(row.get("seconds")), "elapsed": finite_number(row.get("elapsed"))}


def _take_lock(path: Path) -> IO[str]:
    """Lock a run. The kernel drops the lock when its process dies, so a crash leaves nothing to clean up.

    The lock belongs to the open file (flock). A POSIX record lock belongs to the process, which loses it as soon as it
    closes any handle of the file, as a refused second writer does. Over NFS Linux sends flock as a lock of the whole
    file, which other machines see; it needs a file that is open for writing, as this one is.
    """
    file = open_own(path / _LOCK, "a+")
    file.seek(0)
    holder = file.read(64)  # process 4711
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise RunInUseError(
            f"{path} is in use: {holder or 'another process'} is writing this run. Wait for it, or choose another "
            "directory."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    _held_locks.add(file)
    return file


_held_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """Close the locks in a forked process, as that of a reward. Otherwise it would hold them after the run's end."""
    for lock in list(_held_locks):
        lock.close()
    _held_locks.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_leave_locks_to_parent)
