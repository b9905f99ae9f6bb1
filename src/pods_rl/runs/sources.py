"""The user's own code that a run executes: its source files and their hashes. Does not import torch."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

_LEFT_OUT = ("__main__", "__mp_main__", "sitecustomize", "usercustomize")  # the script, and the interpreter's own start
_INSTALLED = {"site-packages", "dist-packages"}
_READING_THREADS = 4  # files read at once, in threads: one core rarely keeps up with a disk
_REQUIREMENT_NAME = re.compile(r"[\w.-]+")


def user_sources() -> dict[str, str]:
    """Return the source files of the user's own modules that this process has imported.

    A module is the user's own unless it is of Python's library, of an installed distribution, or of this package and
    what it requires; one of an editable install is, since its files change under one version. The script itself is not
    in the result: another line of it may change, and `code_hash` has its functions.

    Returns:
        By a module's name as a path (`own/rules.py`), which is the same on every machine, the place of its file.
    """
    # this package and what it requires: `environment.json` has their versions
    required = {"pods_rl"}
    with suppress(PackageNotFoundError):  # it runs from its folder
        for requirement in requires("pods-rl") or ():
            required.add(_REQUIREMENT_NAME.match(requirement)[0].lower().replace("-", "_"))  # type: ignore[index]
    sources: dict[str, str] = {}
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for name, module in sorted(sys.modules.items()):
        if name in _LEFT_OUT or name.partition(".")[0].lower() in required:
            continue
        file: str | None = None
        with suppress(Exception):  # objects of libraries may raise at any access
            file = module.__file__
        if not isinstance(file, str):  # built in, or a package without `__init__.py`
            continue
        place = Path(file).absolute()
        if _INSTALLED & set(place.parts) or any(place.is_relative_to(folder) for folder in libraries):
            continue
        if place.is_file():
            path = name.replace(".", "/")
            path += f"/{place.name}" if place.stem == "__init__" else place.suffix
            sources[path] = str(place)
    return sources


def file_hashes(files: Mapping[str, str | Path]) -> dict[str, str]:
    """Return the sha256 of each file by its key, without those that cannot be read or are not regular files."""
    with ThreadPoolExecutor(_READING_THREADS) as pool:
        digests = pool.map(_sha256, map(Path, files.values()))
        return {name: digest for name, digest in zip(files, digests, strict=True) if digest}


def _sha256(file: Path) -> str:
    with suppress(OSError, ValueError):
        if file.is_file():  # opening a pipe would block
            with file.open("rb", buffering=0) as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()
    return ""


def code_hash(function: Callable[..., Any]) -> str | None:
    """Return a sha256 of a function's source, such as that of a reward in a script; None if it has no source.

    Of a callable object it is the source of its class. `user_sources` has the modules that it imports.

    >>> code_hash(code_hash) == code_hash(code_hash), code_hash(len)
    (True, None)
    """
    with suppress(OSError, TypeError):
        has_source = inspect.isroutine(function) or inspect.isclass(function)
        source = inspect.getsource(inspect.unwrap(function) if has_source else type(function))
        return hashlib.sha256(source.encode("utf-8", "backslashreplace")).hexdigest()
    return None
