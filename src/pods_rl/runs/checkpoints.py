"""Checkpoints that are whole or not there: written beside their place, flushed, hashed, renamed. No torch.

A folder is written under ``.saving/`` in ``checkpoints/``. `publish` flushes every file, reads each back once for its
hash, adds ``manifest.json`` and renames the folder to its place. A kill or a full disk at any moment leaves earlier
checkpoints as they were, and a leftover that `clean` removes. Deleting is a rename first, too.

Only folders called ``checkpoint-<digits>`` with a manifest of ours, of that step, are ours: nothing else is ever
removed, replaced or resumed from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from .files import encoded, read_mapping, to_json

MANIFEST = "manifest.json"
FORMAT = 1
_STAGING = ".saving"
_REPLACED = "replaced-"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
# of a manifest: a checkpoint has tens of files, of a thousand processes some thousands
_MOST_FILES, _LARGEST_MANIFEST = 20_000, 4 << 20
_CHUNK = 1 << 20
_HASHERS = 4  # files hashed at once: hashing lets go of the interpreter, and one core seldom keeps up with a disk


def staging(target: Path) -> Path:
    """Where a folder is written before it is published as ``target``: beside it, so that a rename is enough."""
    return target.parent / _STAGING / target.name


def prepare(target: Path) -> Path:
    """Make an empty folder in ``staging(target)`` and return it; what an interrupted save left goes."""
    staged = staging(target)
    clean(target.parent)
    if staged.parent.is_symlink() or (staged.parent.exists() and not staged.parent.is_dir()):
        _set_aside(staged.parent)
    staged.mkdir(parents=True)
    return staged


def publish(target: Path, about: Mapping[str, Any]) -> None:
    """Put the folder that lies in ``staging(target)`` in its place, whole, with a manifest; an older one is replaced.

    What has this name and is not ours is kept, as ``<name>.kept-1``.

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
    """Remove what an interrupted save or deletion left; a folder taken away for a new one that never came returns."""
    left = checkpoints / _STAGING
    if left.is_symlink() or not left.is_dir():
        return
    for folder in [*left.iterdir()]:
        name = folder.name.removeprefix(_REPLACED)
        if folder.is_symlink() or not (name == "final" or _NAME.fullmatch(name)):
            continue  # the user's
        target = checkpoints / name
        if name != folder.name and not (target.exists() or target.is_symlink()):
            os.replace(folder, target)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty
        left.rmdir()


@contextmanager
def readable_path(path: Path) -> Iterator[Path]:
    """Lend a path to a folder that every library can use: a link, where the path has bytes that are not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory(prefix="pods-") as place:
            link = Path(place, "link")
            link.symlink_to(path.absolute(), target_is_directory=True)
            yield link
    else:
        yield path


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where there is no manifest, or none that can be read."""
    path = folder / MANIFEST
    small = path.is_file() and path.stat().st_size <= _LARGEST_MANIFEST
    return read_mapping(path) if small else {}


def verify(folder: Path, *, hashes: bool = True, named: bool = False) -> list[str]:
    """What is wrong with a checkpoint, a line for each problem; nothing where its manifest holds.

    Files that the manifest does not list are passed over. Without ``hashes`` only names and sizes are compared: at
    once, where hashes read every byte. ``named``: its name must say its step.
    """
    if not folder.is_dir():
        return ["is not a folder"]
    if not (folder / MANIFEST).is_file():
        return [f"no {MANIFEST}: killed while it was saved, or saved by an earlier version or another trainer"]
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or not files:
        return [f"{MANIFEST} cannot be read: expected format {FORMAT}, received {manifest.get('format')!r}"]
    if len(files) > _MOST_FILES or not all(map(_is_inside, files)):
        return [f"{MANIFEST} is not ours: expected at most {_MOST_FILES:,} files, all in this folder"]
    if named and (problem := _name_problem(folder, manifest)):
        return [problem]
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
    for folder in reversed(find_checkpoints(checkpoints)):
        problems = verify(folder, hashes=hashes, named=True)
        if not problems:
            return folder, passed
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        passed.append(f"{folder.name}: {problems[0]}{more}")
    return None, passed


def prune(checkpoints: Path, keep: int, *, best: str | None = None, finished: bool = False) -> None:
    """Remove the oldest of our checkpoints, as transformers does; torn ones count for nothing.

    Call it once the newest is published.

    Args:
        checkpoints: the folder they lie in.
        keep: how many whole ones stay, the newest and the best among them; below 1: all.
        best: the name of the best one, which is never removed.
        finished: the run is over: where one is to stay, it is the best.
    """
    ours = [folder for folder in reversed(find_checkpoints(checkpoints)) if _is_ours(folder)]
    whole = [folder.name for folder in ours if not verify(folder, hashes=False)]
    if keep < 1 or (finished and (keep > 1 or best not in whole)):
        return
    kept = {best} if finished else {best, *whole[:1]} & {*whole}
    kept |= {*[name for name in whole if name not in kept][: max(keep - len(kept), 0)]}
    newer = 0  # whole ones
    for folder in ours:
        if folder.name in whole:
            stays, newer = folder.name in kept, newer + 1
        else:
            stays = newer < keep
        if not stays:
            gone = staging(folder)
            gone.parent.mkdir(exist_ok=True)
            os.replace(folder, gone)  # in one move, so that a kill leaves no half of a checkpoint
    clean(checkpoints)


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """The folders that are called ``checkpoint-<step>``, the oldest first."""
    named = {path: match for path in checkpoints.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return sorted((path for path in named if path.is_dir()), key=lambda path: int(named[path][1]))


def digest(values: Mapping[str, Any]) -> str:
    """A hash of a mapping, the same in any order of its keys.

    >>> digest({"a": 1, "b": None}) == digest({"b": None, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(json.loads(to_json(values)), sort_keys=True).encode()).hexdigest()


def _is_ours(folder: Path) -> bool:
    """Whether a save of ours made a folder and it has its name still: what may be removed or replaced."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    manifest = read_manifest(folder)
    return "format" in manifest and "files" in manifest and not _name_problem(folder, manifest)


def _name_problem(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with the name of a copy, or of one that was renamed: it would be taken for another step."""
    match, step = _NAME.fullmatch(folder.name), manifest.get("step")
    return f"{MANIFEST} is of step {step}" if match and step is not None and step != int(match[1]) else None


def _is_inside(name: str) -> bool:
    """Whether a name in a manifest is one of the checkpoint's own files."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


def _set_aside(path: Path) -> None:
    """Give what is not ours another name."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.kept-{number}")):
        number += 1
    os.replace(path, path.with_name(f"{path.name}.kept-{number}"))


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
