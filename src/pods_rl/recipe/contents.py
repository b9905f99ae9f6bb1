"""Hashes of what decides a run and is not in its recipe: the files and folders that it names, and its modules.

Does not import torch, and does not run a user's module. Every file is read from its first byte to its last: sizes and
times do not prove that contents are equal, and a policy that was trained again has the names and shapes of the old one.

A run records the places of the user's modules that it has imported (`runs.sources.user_sources`). Whatever continues
or repeats it reads the same files again (`module_hashes`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..policies import SHIPPED
from ..runs.identity import MODULES
from ..runs.sources import file_hashes
from .catalog import local_path
from .recipe import DATA_FILES, DATA_FOLDERS, FREE, Recipe

Contents = dict[str, dict[str, str | None]]
"""By key of a recipe: the sha256 of each file that it names, by the file's place; None if it was not read."""

ROWS = "prompts"
"""The key of the hashes of a task's rows, which a run adds once it has made its task (`tasks.row_hashes`)."""

# what transformers and PEFT read of a policy's folder; `manifest.json` describes the files of a checkpoint of ours
_OF_POLICY = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
_DATA_KEYS = ("data_dir", "dataset_name", "dataset_test_name")
_MANIFEST = "manifest.json"
_WEIGHTS_SUFFIX = ".safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_OF_A_RUN = ("status.json", "experiment.yaml")  # a folder with one of them is a result, also if it lies among data


def contents_of(recipe: Recipe, *, weights: bool = True) -> Contents:
    """Return a hash for each file that a recipe names and that decides the run.

    These are data, a policy's folder, and any other file that a key names. Of a policy on the hub it is the commit, if
    that is in the cache. Files that cannot be read are not in it.

    Args:
        recipe: a loaded recipe.
        weights: read the weights of a policy, which may take minutes. If False, their hashes are None.

    >>> from .recipe import load_recipe
    >>> contents_of(load_recipe("tiny-pods"))
    {}
    """
    contents: Contents = {}
    for key, value in recipe.values.items():
        if key == "model_name_or_path":
            of_key = _policy(str(value), str(recipe.values.get("model_revision") or "main"), weights)
        else:
            of_key = _hashes(dict(_named_by(key, value, str(recipe.values["task"]))))
        if of_key:
            contents[key] = of_key
    return contents


def module_hashes(sources: object) -> Contents:
    """Return the hashes of the user's modules, from `user_sources` or as recorded; empty for a run without a record."""
    if not isinstance(sources, Mapping):
        return {}
    return {MODULES: _hashes({str(name): Path(str(place)) for name, place in sources.items()})}


def _named_by(key: str, value: Any, task: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that a key names, each with its place below what is named."""
    if key == "data_dir" and task in DATA_FOLDERS:
        for folder in DATA_FOLDERS[task]:
            yield from _data_files(value, folder, endings=DATA_FILES)
    elif key in _DATA_KEYS:
        # The name of a split, whatever folder has it too. `ROWS` has the hash of its rows.
        if key != "dataset_test_name" or value not in ("train", "test", "validation", "dev"):
            yield from _data_files(value)
    elif key not in FREE:
        for text in _texts(value):
            path = _existing(text)
            if path is not None and path.is_file():
                yield path.name, path


def _data_files(name: str | None, below: str = "", endings: tuple[str, ...] = ("",)) -> Iterator[tuple[str, Path]]:
    """Yield the file that is named, or each file of its folder `below`, without hidden ones and results of runs."""
    root = _existing(name)
    if root is None:
        return
    if root.is_file():
        yield root.name, root
        return
    visited: set[str] = set()  # links may turn in a circle
    for folder, folders, names in os.walk(root / below, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited or set(names) & set(_OF_A_RUN):
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(inner for inner in folders if not inner.startswith((".", "__pycache__")))
        for file in sorted(names):
            path = Path(folder, file)
            wanted = file.lower().endswith(endings) and not file.startswith(".")
            if wanted and path.is_file():  # opening a pipe would block
                yield path.relative_to(root).as_posix(), path


def _existing(name: object) -> Path | None:
    """Return the path that a text names, if there is something."""
    if not isinstance(name, str) or not name.strip():
        return None
    with suppress(UserError, OSError):
        path = local_path(name)
        if path.exists():
            return path
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value that may be a path: it has a folder or an ending."""
    if isinstance(value, str):
        if "/" in value or Path(value).suffix:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _hashes(files: Mapping[str, Path], *, weights: bool = True) -> dict[str, str | None]:
    """Return the sha256 of each file by its place, without those that cannot be read; None for unwanted weights."""
    unread = {} if weights else dict.fromkeys(name for name, file in files.items() if file.suffix == _WEIGHTS_SUFFIX)
    return unread | file_hashes({name: file for name, file in files.items() if name not in unread})


# -- the policy -------------------------------------------------------------------------------------------------------


def _policy(name: str, revision: str, weights: bool, prefix: str = "") -> dict[str, str | None]:
    """Return the hashes of a policy and of the base model of an adapter; of one on the hub its commit."""
    if name in SHIPPED:  # it belongs to the version of this library
        return {}
    folder = _existing(name)
    if folder is None or not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        # The commit to which the revision leads in the local cache, if it is there.
        for config_file in ("config.json", _ADAPTER_CONFIG):
            with suppress(HFValidationError):
                cached = try_to_load_from_cache(name, config_file, revision=revision)
                if isinstance(cached, str):
                    return {f"{prefix}commit": Path(cached).parent.name}  # .../snapshots/<commit>/config.json
        return {}
    files: dict[str, Path] = {}
    for pattern in _OF_POLICY:
        for file in sorted(folder.glob(pattern)):
            if file.name != _MANIFEST and file.is_file():
                files[prefix + file.relative_to(folder).as_posix()] = file
    hashes = _hashes(files, weights=weights)
    if not prefix:
        with suppress(OSError, ValueError, KeyError, TypeError):  # what is wrong is said when the policy loads
            config = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
            hashes |= _policy(str(config["base_model_name_or_path"]), revision, weights, "base/")
    return hashes
