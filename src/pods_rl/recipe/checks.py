"""Check a resolved recipe for what no library checks, and for a task, data and a policy that exist. Imports no torch.

What TRL, transformers, PEFT and torch check themselves is left to them: `training.checking` constructs their objects
before a policy loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engines.trl.batching import check_losses
from ..errors import UserError
from ..text import describe, suggest
from .catalog import SHIPPED
from .reading import local_path, looks_like_path
from .schema import GYM, REWARDS, RULES, TASKS

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*[.:][^\W\d]\w*")  # package.module:function
_GENERATED = ("arithmetic", "words", "countdown", "sorting", GYM)
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_DECAYING = (
    "linear", "cosine", "polynomial", "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay",
)  # fmt: skip


def check_values(values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value or combination that cannot work, except batch sizes."""
    _check_training(values)
    check_losses(values)
    _check_name("rule", values["rule"], RULES)
    _check_task(values)
    _check_model(values["model_name_or_path"])


def _check_training(values: Mapping[str, Any]) -> None:
    schedule, quantised = values.get("lr_scheduler_type"), values.get("load_in_4bit") or values.get("load_in_8bit")
    endless = values.get("max_steps", -1) <= 0 and values.get("num_train_epochs") is None
    if endless and values.get("max_seconds") is None:
        raise UserError("No limit is set: set max_seconds (training clock), max_steps or both.")
    if endless and schedule in _DECAYING:
        raise UserError(
            f"lr_scheduler_type = {schedule} decays over a number of steps, and max_seconds gives none: set max_steps "
            "as well, or lr_scheduler_type: constant."
        )
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        raise UserError(f"lr_scheduler_type = {schedule} needs TRL's evaluation: a recipe evaluates by training clock.")
    if values.get("save_strategy") == "best":
        raise UserError("save_strategy = best needs TRL's evaluation: set steps, epoch or no.")
    if values["max_completion_length"] is None:
        raise UserError("max_completion_length = null: expected a whole number of at least 1.")
    if quantised and values.get("use_vllm"):
        raise UserError(
            "load_in_4bit or load_in_8bit with use_vllm: TRL would merge the adapter into the quantised weights before "
            "each generation, which rounds most of it away and damages the base (huggingface/trl issues 3466 and "
            "4973). Unset it (LoRA on a bf16 base), or set use_vllm: false."
        )
    if values.get("cache_implementation") in ("offloaded", "offloaded_static") and values.get("use_cpu"):
        raise UserError("cache_implementation = offloaded needs a GPU, and use_cpu is true: unset one of them.")
    if values.get("use_vllm") and values.get("use_transformers_continuous_batching"):
        raise UserError("use_vllm and use_transformers_continuous_batching are both true: choose one generator.")


def _check_name(key: str, name: Any, known: tuple[str, ...]) -> None:
    if name not in known and not _IMPORT_PATH.fullmatch(str(name)):
        raise UserError(
            f"{key}: unknown name {name}.{suggest(str(name), known)} Expected one of {', '.join(known)}, or your own "
            "as package.module:function."
        )


def _check_task(values: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown task or reward, and for data that are missing or that the task does not read."""
    task = values["task"]
    library = library_of(task)
    for name, weight in (values["task_rewards"] or {}).items():
        _check_name("task_rewards", name, REWARDS if library is None else (*REWARDS, library))
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UserError(f"task_rewards: {name}: got {describe(weight)}, expected a weight, such as 1.0.")
    if library is None:
        _check_name("task", task, TASKS)
    if library or task in TASKS:
        _check_source(library or task, values)
    for key in ("dataset_name", "dataset_test_name"):
        name = values[key]
        missing = name is not None and not local_path(name).exists()
        if missing and (looks_like_path(name) or Path(name).suffix in _DATA_FILES):
            raise UserError(f"{key} = {name}: there is no such file or directory (looked in {Path.cwd()}).")


def library_of(task: str) -> str | None:
    """Return the library of a task `library:NAME`, or None.

    >>> library_of("reasoning_gym:chain_sum"), library_of("gsm8k")
    ('reasoning_gym', None)
    """
    library, colon, _ = task.partition(":")
    return library if colon and library == GYM else None


def _check_source(task: str, values: Mapping[str, Any]) -> None:
    """Check that the data of a built-in task are given and exist, and that no other data are given."""
    generated, name, folder = task in _GENERATED, values["dataset_name"], values["data_dir"]
    if name and (generated or task == "sciknoweval_chemistry"):
        reads = "generates its prompts" if generated else "reads a published format (data_dir or the hub)"
        raise UserError(f"task = {task} {reads}, so it does not read dataset_name: set task: dataset (or gsm8k).")
    if folder is not None:
        if generated or task == "dataset":
            instead = "generates its prompts" if generated else "is named by dataset_name"
            raise UserError(f"task = {task} {instead}, so it does not read data_dir: unset it.")
        if name:
            raise UserError("data_dir and dataset_name both name the task's data: unset one of them.")
    if values["task_options"] is not None and task != GYM:
        raise UserError(f"task = {task} does not read task_options: unset it, or set task: {GYM}:NAME.")


def _check_model(name: str | None) -> None:
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
