"""Checkpoints that are whole or not there: written beside their place, flushed, hashed, renamed. No torch.

A folder is written under ``.saving/`` in ``checkpoints/``. `publish` flushes every file, reads each back once for its
hash, adds ``manifest.json`` and renames the folder to its place. A kill or a full disk at any moment leaves earlier
checkpoints as they were, and a leftover that `clean` removes. Deleting is a rename first, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .files import read_mapping, step_of, to_json

MANIFEST = "manifest.json"
FORMAT = 1
_STAGING = ".saving"
_REPLACED = "replaced-"
_CHUNK = 1 << 20
_HASHERS = 4  # files hashed at once: hashing lets go of the interpreter, and one core seldom keeps up with a disk


def staging(target: Path) -> Path:
    """Where a folder is written before it is published as ``target``: beside it, so that a rename is enough."""
    return target.parent / _STAGING / target.name


def publish(target: Path, about: Mapping[str, Any]) -> None:
    """Put the folder that lies in ``staging(target)`` in its place, whole, with a manifest; an older one is replaced.

    Args:
        target: the folder to be.
        about: what the manifest says besides sizes and hashes: step, processes, recipe.

    Raises:
        OSError: it cannot be written; what was at ``target`` is as it was.
    """
    staged = staging(target)
    files = {path.relative_to(staged).as_posix(): path for path in _files(staged)}
    with ThreadPoolExecutor(_HASHERS) as pool:
        hashes = list(pool.map(_flush_and_hash, files.values()))
    rows = {
        name: {"bytes": path.stat().st_size, "sha256": digest}
        for (name, path), digest in zip(files.items(), hashes, strict=True)
    }
    with (staged / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(to_json({"format": FORMAT, **about, "files": rows}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in (*{path.parent for path in files.values()}, staged):
        _flush_folder(folder)
    if target.exists():
        os.replace(target, staged.parent / (_REPLACED + target.name))
    os.replace(staged, target)
    _flush_folder(target.parent)
    clean(target.parent)


def clean(checkpoints: Path) -> None:
    """Remove what an interrupted save or deletion left; a folder taken away for a new one that never came returns."""
    left = checkpoints / _STAGING
    for replaced in left.glob(f"{_REPLACED}*"):
        target = checkpoints / replaced.name.removeprefix(_REPLACED)
        if not target.exists():
            os.replace(replaced, target)
    shutil.rmtree(left, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where there is no manifest, or none that can be read."""
    return read_mapping(folder / MANIFEST)


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, a line for each problem; nothing where its manifest holds.

    Files that the manifest does not list are passed over. Without ``hashes`` only names and sizes are compared: at
    once, where hashes read every byte.
    """
    if not (folder / MANIFEST).is_file():
        return [f"no {MANIFEST}: killed while it was saved, or saved by an earlier version"]
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or not files:
        return [f"{MANIFEST} cannot be read: expected format {FORMAT}, received {manifest.get('format')!r}"]
    problems = [problem for name, row in files.items() if (problem := _size_problem(folder / name, row, name))]
    if problems or not hashes:
        return problems
    with ThreadPoolExecutor(_HASHERS) as pool:
        found = list(pool.map(lambda name: _hash(folder / name), files))
    return [
        f"{name} has changed: its hash is not the manifest's"
        for (name, row), digest in zip(files.items(), found, strict=True)
        if digest != row.get("sha256")
    ]


def last_good(checkpoints: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a folder whose manifest holds, and why each newer one was passed over.

    Args:
        checkpoints: ``checkpoints/`` of a run.
        hashes: as `verify` takes it.

    Returns:
        The folder, None where there is none; lines ``checkpoint-8: <problem>``, newest first.
    """
    passed: list[str] = []
    for folder in _newest_first(checkpoints):
        problems = verify(folder, hashes=hashes)
        if not problems:
            return folder, passed
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        passed.append(f"{folder.name}: {problems[0]}{more}")
    return None, passed


def prune(checkpoints: Path, keep: int) -> None:
    """Keep the newest so many whole checkpoints and remove what is older; torn ones count for nothing.

    Call it once the newest is published. ``keep`` below 1 keeps all, as TRL has it.
    """
    whole = 0
    for folder in _newest_first(checkpoints):
        if 1 <= keep <= whole:
            gone = staging(folder)
            gone.parent.mkdir(exist_ok=True)
            os.replace(folder, gone)  # in one move, so that a kill leaves no half of a checkpoint
        else:
            whole += not verify(folder, hashes=False)
    clean(checkpoints)


def digest(values: Mapping[str, Any]) -> str:
    """A hash of a mapping, the same in any order of its keys.

    >>> digest({"a": 1, "b": None}) == digest({"b": None, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(json.loads(to_json(values)), sort_keys=True).encode()).hexdigest()


def _newest_first(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("checkpoint-*"), key=step_of, reverse=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _size_problem(path: Path, row: Any, name: str) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    expected, found = row.get("bytes") if isinstance(row, dict) else None, path.stat().st_size
    return None if found == expected else f"{name} has {found} bytes, expected {expected}"


def _flush_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _flush_folder(path: Path) -> None:
    """A rename is on disk once its folder is; where folders cannot be opened (Windows) there is nothing to flush."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
