"""Write checkpoints atomically: into a staging folder, flushed, hashed, renamed. Does not import torch.

A folder is written under ``.saving/`` in ``checkpoints/``. `publish` flushes every file, reads each back once for its
hash, adds ``manifest.json`` and renames the folder. A kill or a full disk at any moment leaves earlier checkpoints
unchanged, and a leftover that `clean` removes. A deletion also begins with a rename.

Only folders called ``checkpoint-<digits>`` with our manifest of that step are ours: nothing else is removed,
replaced or resumed from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .files import encoded, read_mapping, to_json

MANIFEST = "manifest.json"
FORMAT = 1
_STAGING = ".saving"
_REPLACED = "replaced-"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_HASHERS = 4  # files hashed at once, in threads: one core rarely keeps up with a disk


def staging(target: Path) -> Path:
    """Return the staging path of ``target``: on the same disk, so that it can be renamed."""
    return target.parent / _STAGING / target.name


def prepare(target: Path) -> Path:
    """Make and return an empty folder ``staging(target)``; remove what an interrupted save left."""
    staged = staging(target)
    clean(target.parent)
    staged.mkdir(parents=True)
    return staged


def publish(target: Path, about: Mapping[str, Any]) -> None:
    """Move the folder ``staging(target)`` to ``target``, with a manifest; replace an older one of ours.

    Anything else of that name is kept as ``<name>.kept-1``.

    Args:
        target: the new folder.
        about: content of the manifest next to sizes and hashes: step, processes, recipe.

    Raises:
        OSError: the folder cannot be written; ``target`` is unchanged.
    """
    staged = staging(target)
    files = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
    hashes = _hash_all(files.values(), flush=True)
    rows = {
        name: {"bytes": path.stat().st_size, "sha256": digest}
        for (name, path), digest in zip(files.items(), hashes, strict=True)
    }
    with (staged / MANIFEST).open("wb") as file:
        file.write(encoded(to_json({"format": FORMAT, **about, "files": rows}, indent=1) + "\n"))
        file.flush()
        os.fsync(file.fileno())
    for folder in (*{path.parent for path in files.values()}, staged):
        _flush_folder(folder)
    if _is_ours(target):
        os.replace(target, staged.parent / (_REPLACED + target.name))
    elif target.is_symlink() or target.exists():
        _set_aside(target)
    os.replace(staged, target)
    _flush_folder(target.parent)
    clean(target.parent)


def clean(checkpoints: Path) -> None:
    """Remove leftovers of an interrupted save or deletion; restore a folder whose replacement was never published."""
    left = checkpoints / _STAGING
    for folder in left.glob(f"{_REPLACED}*"):
        target = checkpoints / folder.name.removeprefix(_REPLACED)
        if not target.exists():
            os.replace(folder, target)
    shutil.rmtree(left, ignore_errors=True)


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """Return the problems of a checkpoint, one per line; none if it agrees with its manifest.

    Files that the manifest does not list are ignored. Without ``hashes`` only names and sizes are compared, which is
    quick: hashes read every byte. A folder called ``checkpoint-<step>`` must be of that step.
    """
    if not (folder / MANIFEST).is_file():
        return [f"no {MANIFEST}: killed while it was saved, or saved by an earlier version or another trainer"]
    manifest = read_mapping(folder / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or not files:
        return [f"{MANIFEST} cannot be read: expected format {FORMAT}, got {manifest.get('format')!r}"]
    if problem := _name_problem(folder, manifest):
        return [problem]
    problems = [problem for name, row in files.items() if (problem := _size_problem(folder / name, row, name))]
    if problems or not hashes:
        return problems
    hashed = zip(files.items(), _hash_all([folder / name for name in files]), strict=True)
    return [
        f"{name} has changed: its hash is not the manifest's"
        for (name, row), digest in hashed
        if digest != row.get("sha256")
    ]


def last_good(checkpoints: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that agrees with its manifest, and why each newer one is skipped.

    Args:
        checkpoints: ``checkpoints/`` of a run.
        hashes: as in `verify`.

    Returns:
        The folder, or None; lines ``checkpoint-8: <problem>``, newest first.
    """
    skipped: list[str] = []
    for folder in reversed(find_checkpoints(checkpoints)):
        problems = verify(folder, hashes=hashes)
        if not problems:
            return folder, skipped
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped.append(f"{folder.name}: {problems[0]}{more}")
    return None, skipped


def prune(checkpoints: Path, keep: int) -> None:
    """Remove the oldest of our checkpoints, after the newest is published; damaged ones are not counted.

    Args:
        checkpoints: their folder.
        keep: the number of complete ones to keep. Below 1, all are kept.
    """
    newer = 0  # complete ones
    for folder in reversed(find_checkpoints(checkpoints)) if keep > 0 else ():
        if not _is_ours(folder):
            continue
        if newer >= keep:
            gone = staging(folder)
            gone.parent.mkdir(exist_ok=True)
            os.replace(folder, gone)  # atomic, so that a kill leaves no half-deleted checkpoint
        else:
            newer += not verify(folder, hashes=False)
    clean(checkpoints)


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders called ``checkpoint-<step>``, the oldest first."""
    named = {path: match for path in checkpoints.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return sorted((path for path in named if path.is_dir()), key=lambda path: int(named[path][1]))


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is our checkpoint under its own name, so that it may be removed or replaced."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    manifest = read_mapping(folder / MANIFEST)
    return "format" in manifest and "files" in manifest and not _name_problem(folder, manifest)


def _name_problem(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the problem with a copied or renamed folder, whose name gives another step than its manifest."""
    match, step = _NAME.fullmatch(folder.name), manifest.get("step")
    return f"{MANIFEST} is of step {step}" if match and step is not None and step != int(match[1]) else None


def _set_aside(path: Path) -> None:
    """Rename a folder that is not ours."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.kept-{number}")):
        number += 1
    os.replace(path, path.with_name(f"{path.name}.kept-{number}"))


def _size_problem(path: Path, row: Any, name: str) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    expected, found = row.get("bytes") if isinstance(row, dict) else None, path.stat().st_size
    return None if found == expected else f"{name} has {found} bytes, expected {expected}"


def _hash_all(paths: Iterable[Path], *, flush: bool = False) -> list[str]:
    """Return the sha256 of each file, read once; ``flush``: write it to disk first."""

    def sha256(path: Path) -> str:
        with path.open("rb") as file:
            if flush:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_HASHERS) as pool:
        return list(pool.map(sha256, paths))


def _flush_folder(path: Path) -> None:
    """Flush a folder's entries, such as a rename, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
