"""The user's own code that a run executes: its source files and their hashes. Does not import torch."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALLED = {"site-packages", "dist-packages"}
_READERS = 4  # files read at once, in threads: one core rarely keeps up with a disk
_NAME = re.compile(r"[\w.-]+")


def user_sources(modules: Iterable[str]) -> dict[str, str]:
    """Return the source files of modules that this process has imported, and of the user's modules that they reach.

    A module reaches what its source imports, also in a function or through `import_module` with a literal name, and the
    modules of its global values. It is the user's own unless it is of Python's library, of an installed distribution,
    or of this package and what it requires; one of an editable install is, since its files change under one version.
    What else the process has imported does not count. Not seen is an import by a computed name whose result is in no
    global value.

    Args:
        modules: names of modules. Those of installed packages are not in the result (`installed_hash`).

    Returns:
        By a module's name as a path (`own/rules.py`), which is the same on every machine, the place of its file.
    """
    sources: dict[str, str] = {}
    queue = list(modules)
    seen: set[str] = set()
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        file = _file_of(name)
        if file is None:
            continue
        is_package = file.stem == "__init__"
        path = name.replace(".", "/")
        sources[f"{path}/{file.name}" if is_package else f"{path}{file.suffix}"] = str(file)
        parent = name.rpartition(".")[0]
        queue += [parent] if parent else []  # imported before its module
        queue += _imports(file, package=name if is_package else parent)
        queue += _modules_of_values(sys.modules.get(name))
    return dict(sorted(sources.items()))


def _file_of(name: str) -> Path | None:
    """Return the file of a module, if the module is the user's own; a package without `__init__.py` has none."""
    if not name or name.partition(".")[0].lower() in _required():
        return None
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        spec = _find(name)
        file = spec.origin if spec is not None and spec.has_location else None
    if not isinstance(file, str):
        return None
    path = Path(file).absolute()
    return path if path.is_file() and not _is_installed(path) else None


def _is_installed(file: Path) -> bool:
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return bool(_INSTALLED & set(file.parts)) or any(file.is_relative_to(folder) for folder in libraries)


@cache
def _required() -> frozenset[str]:
    """Return the names of this package and of what it requires: `environment.json` has their versions."""
    names = {"pods_rl"}
    with suppress(PackageNotFoundError):  # it runs from its folder
        for requirement in requires("pods-rl") or ():
            names.add(_NAME.match(requirement)[0].lower().replace("-", "_"))  # type: ignore[index]
    return frozenset(names)


def _find(module: str) -> ModuleSpec | None:
    """Return where a module lies, without importing it or the packages around it; None if it does not exist."""
    path: Any = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and count < len(parts):  # a module holds no others
            return None
    return spec


def _spec(name: str, path: Any) -> ModuleSpec | None:
    """Return what the import system finds for a module in a package's path."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        with suppress(Exception):  # a finder of a library may raise anything
            spec = find(name, path) if find else None
            if isinstance(spec, ModuleSpec):
                return spec
    return None


def _imports(file: Path, package: str) -> Iterator[str]:
    """Yield the names of the modules that a source may import, anywhere in its text."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # not a Python source
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            joint = "." if node.module else ""
            names = [base, *(f"{base}{joint}{alias.name}" for alias in node.names)]  # a module or a name in it
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            names = [str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)]
        for name in names:
            with suppress(ImportError, ValueError):  # beyond the top-level package
                yield resolve_name(name, package)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _modules_of_values(module: ModuleType | None) -> Iterator[str]:
    """Yield the names of the modules that a module's global values are, or are from; also of the values in a table."""
    if module is None:  # not imported
        return
    for attribute, value in list(vars(module).items()):
        # any import of a module of a package makes that a value of the package
        if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{attribute}":
            continue
        entries = [value]
        if isinstance(value, dict):
            entries += value.values()
        elif isinstance(value, (list, tuple)):
            entries += value
        for entry in entries:
            with suppress(Exception):  # objects of libraries may raise at any access
                name = entry.__name__ if isinstance(entry, ModuleType) else entry.__module__
                if isinstance(name, str) and name != "__main__":
                    yield name


def installed_hash(package: str) -> str | None:
    """Return a sha256 of the sources of an installed package or module; None for any other, and for what we require.

    It is of the files as they are, since a package may be installed again, or edited, under one version.
    """
    spec = None if package.lower() in _required() else _find(package)
    if spec is None or not spec.origin or not _INSTALLED & set(Path(spec.origin).parts):
        return None
    files = {"": Path(spec.origin)}
    for folder in spec.submodule_search_locations or ():
        files |= {path.relative_to(folder).as_posix(): path for path in sorted(Path(folder).rglob("*.py"))}
    return hashlib.sha256(repr(sorted(file_hashes(files).items())).encode()).hexdigest()


def file_hashes(files: Mapping[str, str | Path]) -> dict[str, str]:
    """Return the sha256 of each file by its key, without those that cannot be read or are not regular files."""
    with ThreadPoolExecutor(_READERS) as pool:
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

    Of a callable object it is the source of its class. `user_sources([function.__module__])` has what it imports.

    >>> code_hash(code_hash) == code_hash(code_hash), code_hash(len)
    (True, None)
    """
    with suppress(OSError, TypeError):
        has_source = inspect.isroutine(function) or inspect.isclass(function)
        source = inspect.getsource(inspect.unwrap(function) if has_source else type(function))
        return hashlib.sha256(source.encode("utf-8", "backslashreplace")).hexdigest()
    return None
