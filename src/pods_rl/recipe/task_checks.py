"""Check that the task, data and policy of a recipe exist, before torch is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from .catalog import SHIPPED
from .fields import describe, suggest
from .reading import local_path, looks_like_path
from .schema import LIBRARIES, REWARDS, TASKS

IMPORT_PATH = re.compile(r"[^\W\d][\w.]*[.:][^\W\d]\w*")  # package.module:function
_GENERATED = ("arithmetic", "words", "countdown", "sorting", "calculator", "reasoning_gym")
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_MOST_BYTES = 64 << 20  # of a data file are read here; the loader checks the rest


def check_task(values: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown task or reward, and for data that are missing, damaged or not read by the task."""
    library = library_of(values["task"])
    for name, weight in (values["task_rewards"] or {}).items():
        if name not in (*REWARDS, library) and not IMPORT_PATH.fullmatch(name):
            raise UserError(
                f"task_rewards: unknown reward {name}: expected {', '.join(REWARDS)}, or your own as "
                f"package.module:function.{suggest(str(name), REWARDS)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise UserError(f"task_rewards: {name}: got {describe(weight)}, expected a weight, such as 1.0.")
    if library or values["task"] in TASKS:
        _check_task_source(values["task"], values)
    elif not IMPORT_PATH.fullmatch(values["task"]):
        raise UserError(
            f"task = {values['task']}: expected one of {', '.join(TASKS)}, {':NAME, '.join(LIBRARIES)}:NAME, or your "
            "own as package.module:function."
            f"{suggest(values['task'], TASKS)}"
        )
    for key in ("dataset_name", "dataset_test_name"):
        if values[key] is not None:
            _check_data(key, values[key], values)


def library_of(task: str) -> str | None:
    """Return the library of a task `library:NAME`, or None.

    >>> library_of("reasoning_gym:chain_sum"), library_of("gsm8k")
    ('reasoning_gym', None)
    """
    library, colon, _ = task.partition(":")
    return library if colon and library in LIBRARIES else None


def _check_task_source(task: str, values: Mapping[str, Any]) -> None:
    """Check that the data of a built-in task are given and exist, and that no other data are given."""
    library = library_of(task)
    generated = task in _GENERATED or library is not None
    if values["dataset_name"] and (generated or task == "sciknoweval_chemistry"):
        reads = "generates its prompts" if generated else "reads a published format (data_dir or the hub)"
        raise UserError(f"task = {task} {reads}, so it does not read dataset_name: set task: dataset (or gsm8k).")
    if task == "dataset" and not values["dataset_name"]:
        raise UserError("task = dataset needs dataset_name: a JSONL or parquet file, a directory or hub id.")
    if values["data_dir"] is not None:
        _check_data_dir(task, values["data_dir"], values)
    if values["task_options"] is not None and not library and task != "reasoning_gym":
        raise UserError(f"task = {task} does not read task_options: unset it, or set task: reasoning_gym:NAME.")
    if library:
        if task == f"{library}:":
            raise UserError(f"task = {task} needs a name after the colon, as in {LIBRARIES[library]}.")
        if find_spec(library) is None:
            extra = library.replace("_", "-")
            raise UserError(f"task = {task} needs {extra}, which is not installed: pip install 'pods-rl[{extra}]'.")
    if task == "reasoning_gym":
        if "dataset" not in (values["task_options"] or {}):
            raise UserError("task = reasoning_gym needs task_options with its data set, as in {dataset: chain_sum}.")
        if find_spec("reasoning_gym") is None:
            raise UserError("task = reasoning_gym is not installed: pip install 'pods-rl[reasoning-gym]'.")


def _check_data_dir(task: str, folder: str, values: Mapping[str, Any]) -> None:
    generated = task in _GENERATED or library_of(task) is not None
    if generated or task == "dataset":
        instead = "generates its prompts" if generated else "is named by dataset_name"
        raise UserError(f"task = {task} {instead}, so it does not read data_dir: unset it.")
    if values["dataset_name"]:
        raise UserError("data_dir and dataset_name both name the task's data: unset one of them.")
    if not local_path(folder).is_dir():
        raise UserError(f"data_dir = {folder}: there is no such folder (looked in {Path.cwd()}).")


def _check_data(key: str, name: str, values: Mapping[str, Any]) -> None:
    path = local_path(name)
    if not path.exists():
        if looks_like_path(name) or path.suffix in _DATA_FILES:
            raise UserError(f"{key} = {name}: there is no such file or directory (looked in {Path.cwd()}).")
    elif path.suffix == ".jsonl":
        columns = _read_columns(key, path)
        for column in ("question_column", "answer_column"):
            wanted = values[column]
            if wanted is not None and wanted not in columns:
                raise UserError(
                    f"{column} = {wanted}: {path} has the columns {', '.join(columns)}."
                    f"{suggest(wanted, columns) or ' Name one of them.'}"
                )


def _read_columns(key: str, path: Path) -> list[str]:
    """Return the columns of a JSONL file's first row; raise UserError for a line that is not a JSON object."""
    columns: list[str] | None = None
    read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                if read > _MOST_BYTES:
                    break
                if line.strip():
                    row = _row(line, f"{key} = {path}, line {number}")
                    columns = list(row) if columns is None else columns
    except OSError as error:
        raise UserError(f"{key} = {path}: cannot be read: {error.strerror}. Name another file.") from error
    if columns is None:
        raise UserError(f"{key} = {path}: holds no rows: expected a JSON object on each line.")
    return columns


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, UnicodeDecodeError):
            why = "not text in UTF-8"
        elif isinstance(error, RecursionError):
            why = "nested too deeply"
        shown = line[:60].decode("utf-8", "replace").strip()
        raise UserError(f"{where}: {shown!r} is not JSON ({why}): correct that row, or remove it.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: is a {type(row).__name__}: expected a JSON object on each line.")
    return row


def check_model(name: str | None) -> None:
    """Raise UserError if no policy is named, or its path holds no model."""
    if name is None:
        raise UserError(
            "model_name_or_path is not set: give a local path, a hub id, or "
            f"{' or '.join(f'{policy} (shipped, for task {task})' for policy, task in SHIPPED.items())}."
        )
    path = local_path(name)
    if name in SHIPPED or (not path.exists() and not looks_like_path(name)):
        return
    if not path.is_dir():
        raise UserError(f"model_name_or_path = {name}: there is no such directory (looked in {Path.cwd()}).")
    if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise UserError(f"model_name_or_path = {name}: holds no config.json, so it is not a saved model.")
