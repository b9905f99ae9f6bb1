"""Write checkpoints atomically: into a staging folder, flushed, hashed, renamed. Does not import torch.

A folder is written under ``.saving/`` in ``checkpoints/``. `publish` flushes every file, reads each back once for its
hash, adds ``manifest.json`` and renames the folder. A kill or a full disk at any moment leaves earlier checkpoints
unchanged, and a leftover that `clean` removes. A deletion also begins with a rename.

Only folders called ``checkpoint-<digits>`` with our manifest of that step are ours: nothing else is removed,
replaced or resumed from.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import encoded, read_mapping, step_of, to_json
from .identity import is_of_other_run, token_of
from .sources import file_hashes

MANIFEST = "manifest.json"
FORMAT = 1
_STAGING = ".saving"
_REPLACED = "replaced-"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(?:0|[1-9][0-9]*)")


def staging(target: Path) -> Path:
    """Return the staging path of ``target``: on the same disk, so that it can be renamed."""
    return target.parent / _STAGING / target.name


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
    for path in files.values():
        _flush_to_disk(path)
    hashes = file_hashes(files)
    rows = {name: {"bytes": path.stat().st_size, "sha256": hashes[name]} for name, path in files.items()}
    with (staged / MANIFEST).open("wb") as file:
        file.write(encoded(to_json({"format": FORMAT, **about, "files": rows}, indent=1) + "\n"))
        file.flush()
        os.fsync(file.fileno())
    # A rename is safe only once the entries of every folder are on disk.
    for folder in {path.parent for path in files.values()} | {staged}:
        _flush_to_disk(folder)
    if _is_ours(target):
        os.replace(target, staged.parent / (_REPLACED + target.name))
    elif os.path.lexists(target):  # not ours
        number = 1
        while os.path.lexists(target.with_name(f"{target.name}.kept-{number}")):
            number += 1
        os.replace(target, target.with_name(f"{target.name}.kept-{number}"))
    os.replace(staged, target)
    _flush_to_disk(target.parent)
    clean(target.parent)


def clean(checkpoints: Path) -> None:
    """Remove leftovers of an interrupted save or deletion; restore a folder whose replacement was never published."""
    staging_folder = checkpoints / _STAGING
    for folder in staging_folder.glob(f"{_REPLACED}*"):
        target = checkpoints / folder.name.removeprefix(_REPLACED)
        if not target.exists():
            os.replace(folder, target)
    shutil.rmtree(staging_folder, ignore_errors=True)


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """Return the problems of a checkpoint, one per line; none if it agrees with its manifest.

    Files that the manifest does not list are ignored. Without ``hashes`` only names and sizes are compared, which is
    quick: hashes read every byte. A folder called ``checkpoint-<step>`` must be of that step.
    """
    if not (folder / MANIFEST).is_file():
        return [f"no {MANIFEST}: killed while it was saved, or saved by another trainer"]
    manifest = read_mapping(folder / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or not files:
        return [f"{MANIFEST} cannot be read: expected format {FORMAT}, got {manifest.get('format')!r}"]
    name_problem = _name_problem(folder, manifest)
    if name_problem is not None:
        return [name_problem]
    problems = []
    for name, row in files.items():
        expected = row.get("bytes") if isinstance(row, dict) else None
        if not (folder / name).is_file():
            problems.append(f"{name} is missing")
        elif (folder / name).stat().st_size != expected:
            problems.append(f"{name} has {(folder / name).stat().st_size} bytes, expected {expected}")
    if problems or not hashes:
        return problems
    digests = file_hashes({name: folder / name for name in files})
    for name, row in files.items():
        if digests.get(name, "") != row.get("sha256"):
            problems.append(f"{name} has changed: its hash is not the manifest's")
    return problems


def last_good(checkpoints: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint of a run that agrees with its manifest, and why each newer one is skipped.

    Args:
        checkpoints: ``checkpoints/`` of a run. A checkpoint that was copied from another run is skipped.
        hashes: as in `verify`.

    Returns:
        The folder, or None; lines ``checkpoint-8: <problem>``, newest first.
    """
    skipped: list[str] = []
    token = token_of(checkpoints.parent)
    for folder in reversed(find_checkpoints(checkpoints)):
        problems = verify(folder, hashes=hashes)
        if not problems and is_of_other_run(folder, token):
            problems = ["it is of another run"]
        if not problems:
            return folder, skipped
        line = f"{folder.name}: {problems[0]}"
        if len(problems) > 1:
            line += f" (and {len(problems) - 1} more)"
        skipped.append(line)
    return None, skipped


def prune(checkpoints: Path, keep: int) -> None:
    """Remove the oldest of our checkpoints beyond `keep` complete ones, below 1 none; damaged ones do not count."""
    if keep > 0:
        complete = 0
        for folder in reversed(find_checkpoints(checkpoints)):
            if not _is_ours(folder):
                continue
            if complete >= keep:
                # A rename is atomic, so that a kill leaves no half-deleted checkpoint; `clean` removes it.
                staging(folder).parent.mkdir(exist_ok=True)
                os.replace(folder, staging(folder))
            elif not verify(folder, hashes=False):
                complete += 1
    clean(checkpoints)


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders called ``checkpoint-<step>``, the oldest first."""
    named = [path for path in checkpoints.glob("checkpoint-*") if _CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted((path for path in named if path.is_dir()), key=step_of)


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is our checkpoint under its own name, so that it may be removed or replaced."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    manifest = read_mapping(folder / MANIFEST)
    return "format" in manifest and "files" in manifest and not _name_problem(folder, manifest)


def _name_problem(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the problem with a copied or renamed folder, whose name gives another step than its manifest."""
    step = manifest.get("step")
    if step in (None, step_of(folder)) or not _CHECKPOINT_NAME.fullmatch(folder.name):
        return None
    return f"{MANIFEST} is of step {step}"


def _flush_to_disk(path: Path) -> None:
    """Write a file, or the entries of a folder such as a rename, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
