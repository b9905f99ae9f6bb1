"""Write a run, by one writer at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from .files import (
    CONFIG,
    ENVIRONMENT,
    EVALS,
    EVALUATIONS,
    METRICS,
    ROLLOUTS,
    STATUS,
    number,
    open_own,
    read_jsonl,
    step_of,
    to_json,
    write_atomic,
    write_parquet,
)
from .run import Run, is_run

try:
    import fcntl
except ImportError:  # Windows has no fcntl: two writers are then not told apart
    fcntl = None  # type: ignore[assignment]

_LONGEST_HOLDER = 64
STATES = ("running", "finished", "stopped", "failed")
_LOCK = ".lock"
_locks: set[IO[str]] = set()  # held by this process


def _close_in_child() -> None:
    """Let a forked child go on without our locks: one that outlives us would hold them."""
    while _locks:
        _locks.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class RunInUseError(UserError):
    """Another process, or another writer of this one, holds the run."""


class RunWriter:
    """Writes one run directory, and holds it: a second writer is refused until ``close``.

    ``resume=True`` goes on with a run that is there; else a directory that already holds one is refused.
    Use as a context manager. Numbers that are not finite are written as null.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._files: dict[str, IO[str]] = {}
        around = None if resume else _run_around(self.path)
        if around:
            raise UserError(f"{self.path} lies inside the run {around}. Choose another directory with --output.")
        for name in (_LOCK, METRICS, EVALS):
            if (self.path / name).is_symlink():
                raise UserError(
                    f"{self.path / name} is a link: writing there would change the file it points to. Remove the link, "
                    "or choose another --output."
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path)
        except OSError as error:
            raise UserError(
                f"Cannot write to {self.path}: {error.strerror}. Choose another directory with --output."
            ) from error
        if not resume and is_run(self.path):
            self.close()
            raise UserError(
                f"{self.path} already holds a run ({Run(self.path).state}). Choose another directory with "
                "--output, or continue it with --resume."
            )

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a disk that was full when a line was written, which was told then
                file.close()
        self._files.clear()
        _locks.discard(self._lock)
        self._lock.close()

    def write_config(self, text: str) -> None:
        """``Recipe.to_yaml()``, as ``config.yaml``."""
        write_atomic(self.path / CONFIG, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        write_atomic(self.path / ENVIRONMENT, to_json(environment, indent=2) + "\n")

    def write_status(
        self,
        state: str,
        *,
        reason: str | None = None,
        step: int = 0,
        seconds: float = 0.0,
        elapsed: float = 0.0,
    ) -> None:
        """``seconds`` is the training clock, ``elapsed`` the wall clock since the run's start."""
        if state not in STATES:
            raise ValueError(f"state is {state!r}, expected one of {', '.join(STATES)}")
        status = {"state": state, "reason": reason, "step": step, "seconds": seconds, "elapsed": elapsed}
        write_atomic(self.path / STATUS, to_json(status, indent=2) + "\n")

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self._append(METRICS, row)

    def append_eval(self, row: Mapping[str, Any]) -> None:
        self._append(EVALS, row)

    def write_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
        """A parquet file with one row per rollout of a step; every column has the same length."""
        return write_parquet(self.path / ROLLOUTS / f"step-{step:06d}.parquet", columns)

    def write_evaluation(self, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
        """A parquet file with one row per completion of the evaluation after a step; a later one replaces it."""
        return write_parquet(self.path / EVALUATIONS / f"step-{step:06d}.parquet", columns)

    def rewind(self, step: int, evaluations: int) -> None:
        """Forget what came after ``step``, and all but the first ``evaluations``: a resumed run makes them again."""
        self._keep(METRICS, lambda row, _: number(row.get("step"), -1) <= step)
        evaluated = self._keep(EVALS, lambda row, i: number(row.get("step"), -1) <= step and i < evaluations)
        kept = {number(row.get("step"), -1) for row in evaluated}
        stale = [path for path in Run(self.path).rollout_files() if step_of(path) > step]
        stale += [path for path in Run(self.path).evaluation_files() if step_of(path) not in kept]
        for path in stale:
            if path.is_file() and re.fullmatch(r"step-\d{6,}\.parquet", path.name):  # else it is the user's
                path.unlink()

    def _keep(self, name: str, wanted: Callable[[dict[str, Any], int], bool]) -> list[dict[str, Any]]:
        """Keep the wanted rows of a file, by row and number, and return them."""
        if not (self.path / name).exists():
            return []
        kept = [row for i, row in enumerate(read_jsonl(self.path / name)) if wanted(row, i)]
        if name in self._files:
            self._files.pop(name).close()
        write_atomic(self.path / name, "".join(to_json(row) + "\n" for row in kept))
        return kept

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            path = self.path / name
            torn = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
            self._files[name] = open_own(path, "a")
            if torn:  # a kill left half a line: end it, so that ours starts on its own
                self._files[name].write("\n")
        self._files[name].write(to_json(row) + "\n")


def end_run(path: str | Path, state: str, reason: str) -> bool:
    """Say how a run ended that had no time to say so itself; False where it has.

    Raises RunInUseError where it is still being written.
    """
    found = Run(Path(path))
    if found.state in ("finished", "stopped", "failed"):
        return False
    with RunWriter(path, resume=True) as writer:
        writer.write_status(state, reason=reason, step=found.step, seconds=found.seconds, elapsed=found.elapsed)
    return True


def _run_around(path: Path) -> Path | None:
    """The run that a directory lies in, if it does; a project's folder with a config.yaml of its own is none."""
    return next((p for p in path.resolve().parents if (p / CONFIG).is_file() and (p / STATUS).is_file()), None)


def _take_lock(path: Path) -> IO[str]:
    """Lock a run. The kernel drops the lock when its process dies, so a crash leaves nothing to clean up.

    The lock belongs to the open file (flock). A POSIX record lock belongs to the process: it is gone as soon as the
    process closes any other handle of the file, as a second writer does that is refused. Over NFS Linux sends flock as
    a lock of the whole file, which other machines see; it needs a file that is open for writing, as this one is.
    """
    file = open_own(path / _LOCK, "a+")
    file.seek(0)
    holder = file.read(_LONGEST_HOLDER).strip()
    ours = re.fullmatch(r"process \d+", holder)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise RunInUseError(
            f"{path} is in use: {holder if ours else 'another process'} is writing this run. Wait for it, or choose "
            "another --output."
        ) from None
    if ours or not holder:  # else a file of the user's
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
    _locks.add(file)
    return file
