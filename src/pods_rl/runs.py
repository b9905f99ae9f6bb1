"""The run directory: plain files, written so that a kill at any moment leaves them readable. No torch.

The table of files and fields is in ``docs/architecture.md`` ("Run directory").
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import yaml

from .errors import UserError

try:
    import fcntl
except ImportError:  # Windows has no fcntl: two writers are then not told apart
    fcntl = None  # type: ignore[assignment]

CONFIG, ENVIRONMENT, STATUS = "config.yaml", "environment.json", "status.json"
METRICS, EVALS, ROLLOUTS, CHECKPOINTS = "metrics.jsonl", "evals.jsonl", "rollouts", "checkpoints"
EVALUATIONS = "evaluations"
STATES = ("running", "finished", "stopped", "failed")
_LOCK = ".lock"
_locked_here: set[Path] = set()  # POSIX record locks do not tell two writers of one process apart


class RunInUseError(UserError):
    """Another process, or another writer of this one, holds the run."""


# ------------------------------------------------------------------------------------------------ reading


class Run:
    """What a run directory holds: a snapshot, each file read once, on first use.

    A file that is missing reads as empty, and a line that a kill tore in half is left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run at ``path``; raises UserError where there is none."""
        path = Path(path)
        if not is_run(path):
            there = "is not a run directory" if path.is_dir() else "does not exist"
            raise UserError(
                f"{path} {there}: expected a directory with {CONFIG} or {STATUS}, as `pods train` writes it."
            )
        return cls(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def config(self) -> dict[str, Any]:
        return _read_mapping(self.path / CONFIG)

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _read_mapping(self.path / ENVIRONMENT)

    @cached_property
    def status(self) -> dict[str, Any]:
        return _read_mapping(self.path / STATUS)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / METRICS))

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / EVALS))

    @property
    def state(self) -> str:
        """One of STATES, or ``unknown`` where status.json is missing or torn."""
        return str(self.status.get("state", "unknown"))

    @property
    def seed(self) -> int | None:
        """The seed of the recipe, else the k of a directory called ``seed-<k>``."""
        seed = self.config.get("seed")
        if isinstance(seed, int):
            return seed
        match = re.fullmatch(r"seed-(\d+)", self.path.name)
        return int(match[1]) if match else None

    def rollout_files(self) -> list[Path]:
        """The ledger's files, ordered by step."""
        return sorted((self.path / ROLLOUTS).glob("step-*.parquet"), key=_step_of)

    def evaluation_files(self) -> list[Path]:
        """The completions of each evaluation, ordered by step."""
        return sorted((self.path / EVALUATIONS).glob("step-*.parquet"), key=_step_of)

    def checkpoints(self) -> list[Path]:
        """TRL's checkpoints, ordered by step; ``final/`` is not among them."""
        return sorted((self.path / CHECKPOINTS).glob("checkpoint-*"), key=_step_of)

    @property
    def final_checkpoint(self) -> Path | None:
        path = self.path / CHECKPOINTS / "final"
        return path if path.is_dir() else None


def is_run(path: str | Path) -> bool:
    """Whether a directory holds a run, however far it got."""
    return any((Path(path) / name).is_file() for name in (CONFIG, STATUS))


def find_runs(experiment_dir: str | Path) -> dict[str, list[Run]]:
    """Every run below a directory, by arm: ``<arm>/seed-<k>/``, ``<run>/``, or the directory itself.

    Hidden directories are passed over (an experiment keeps earlier attempts in one). Arms come in
    the order of ``experiment.yaml`` where there is one, else by name; runs by seed.
    """
    root = Path(experiment_dir)
    if not root.is_dir():
        raise UserError(f"{root} does not exist: expected a directory written by `pods compare` or `pods train`.")
    if is_run(root):
        return {root.resolve().name: [Run(root)]}
    arms: dict[str, list[Run]] = {}
    for child in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        paths = [child] if is_run(child) else [p for p in child.iterdir() if p.is_dir() and is_run(p)]
        if paths:
            arms[child.name] = [Run(p) for p in sorted(paths, key=lambda p: (_step_of(p), p.name))]
    declared = _read_mapping(root / "experiment.yaml").get("arms")
    order = [*declared] if isinstance(declared, Mapping) else []
    order += [name for name in arms if name not in order]
    return {name: arms[name] for name in order if name in arms}


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a torn line, or one that is no object, is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (FileNotFoundError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _step_of(path: Path) -> int:
    match = re.search(r"-(\d+)(?:\.\w+)?$", path.name)
    return int(match[1]) if match else -1


# ------------------------------------------------------------------------------------------------ writing


class RunWriter:
    """Writes one run directory, and holds it: a second writer is refused until ``close``.

    ``resume=True`` goes on with a run that is there; else a directory that already holds one is refused.
    Use as a context manager. Numbers that are not finite are written as null.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._files: dict[str, IO[str]] = {}
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

    def rewind(self, step: int) -> None:
        """Forget what came after ``step``: a resumed run makes those steps again."""
        for name in (METRICS, EVALS):
            if (self.path / name).exists():
                kept = [row for row in read_jsonl(self.path / name) if _number(row.get("step")) <= step]
                if name in self._files:
                    self._files.pop(name).close()
                write_atomic(self.path / name, "".join(to_json(row) + "\n" for row in kept))
        for path in (*Run(self.path).rollout_files(), *Run(self.path).evaluation_files()):
            if _step_of(path) > step:
                path.unlink()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            path = self.path / name
            torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            # a lone surrogate, which no UTF-8 file can hold, becomes a JSON escape
            self._files[name] = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            if torn:  # a kill left half a line: end it, so that ours starts on its own
                self._files[name].write("\n")
        self._files[name].write(to_json(row) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one move, so that a reader sees the old text or the new, never half of one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_parquet(target: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """A table in one move, its folder made where there is none; text that UTF-8 cannot hold is escaped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    try:
        table = pa.table({name: [_storable(value) for value in column] for name, column in columns.items()})
        pq.write_table(table, part, compression="zstd")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _storable(value: Any) -> Any:
    """A lone surrogate becomes an escape, as in our JSON."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


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


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON of anything a run logs: numpy and torch scalars unwrapped, what is not finite as null.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)})
    '{"loss": null, "steps": [1, 2]}'
    """
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def _plain(value: Any) -> Any:
    """JSON's own types: scalars of numpy and torch unwrapped, paths as text, what is not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else -1
