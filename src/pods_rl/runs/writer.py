"""Write a run, by one writer at a time."""

from __future__ import annotations

import os
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

STATES = ("running", "finished", "stopped", "failed")
_LOCK = ".lock"
_locked_here: set[Path] = set()  # POSIX record locks do not tell two writers of one process apart


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
        _locked_here.discard(self.path.resolve())
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
        self._keep(METRICS, lambda row, _: _number(row.get("step")) <= step)
        evaluated = self._keep(EVALS, lambda row, i: _number(row.get("step")) <= step and i < evaluations)
        for path in Run(self.path).rollout_files():
            if step_of(path) > step:
                path.unlink()
        for path in Run(self.path).evaluation_files():
            if step_of(path) not in [row.get("step") for row in evaluated]:  # a list: a damaged step may be one
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
            torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            # a lone surrogate, which no UTF-8 file can hold, becomes a JSON escape
            self._files[name] = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
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
        kept = {key: found.status.get(key) or 0 for key in ("step", "seconds", "elapsed")}
        writer.write_status(state, reason=reason, **kept)
    return True


def _run_around(path: Path) -> Path | None:
    """The run that a directory lies in, if it does; a project's folder with a config.yaml of its own is none."""
    return next((p for p in path.resolve().parents if (p / CONFIG).is_file() and (p / STATUS).is_file()), None)


def _take_lock(path: Path) -> IO[str]:
    """The kernel drops this lock when its process dies, so a crash leaves nothing to clean up."""
    where = path.resolve()
    file = (path / _LOCK).open("a+", encoding="utf-8")
    try:
        if where in _locked_here:
            raise BlockingIOError
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunInUseError(
            f"{path} is in use: {holder} is writing this run. Wait for it, or choose another --output."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    _locked_here.add(where)
    return file


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else -1
