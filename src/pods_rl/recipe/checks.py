"""What makes a recipe impossible, found before torch is loaded."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..planning.batching import BatchPlan, check_batch
from ..planning.losses import check_losses
from .fields import describe, suggest
from .limits import check_limits
from .reading import local_path
from .rows import check_rows
from .schema import REWARDS, RULES, TASKS, TINY

_GENERATED = ("arithmetic", "countdown", "sorting", "reasoning_gym")
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_OWN = re.compile(r"[^\W\d][\w.]*[.:][^\W\d]\w*")  # package.module:function
_DECAYING = (
    "linear",
    "cosine",
    "polynomial",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "warmup_stable_decay",
)
_BATCH_KEYS = (
    "num_generations", "num_rollouts", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "generation_batch_size", "rollout_batch_size", "use_vllm",
)  # fmt: skip


def check_values(values: Mapping[str, Any]) -> None:
    """Raises UserError for the first thing in a resolved recipe that cannot work, but for its batches."""
    for check in (check_limits, _check_length, _check_rule, check_losses, _check_generator, _check_precision):
        check(values)
    _check_task(values)
    _check_model(values)


def _check_length(values: Mapping[str, Any]) -> None:
    steps = values.get("max_steps", -1)
    if steps <= 0 and values.get("num_train_epochs") is None:
        if values.get("max_seconds") is None:
            raise UserError("Nothing says when to stop: set max_seconds (training clock), max_steps or both.")
        if values["lr_scheduler_type"] in _DECAYING:
            raise UserError(
                f"lr_scheduler_type = {values['lr_scheduler_type']} decays over a number of steps, and "
                "max_seconds "
                "gives none: set max_steps as well, or lr_scheduler_type: constant."
            )


def batch_plan(values: Mapping[str, Any], processes: int | None = None) -> BatchPlan:
    """What a step handles; raises UserError where the batches do not hold whole groups."""
    return check_batch(**{key: values[key] for key in _BATCH_KEYS if key in values}, processes=processes)


def _check_rule(values: Mapping[str, Any]) -> None:
    rule = values["rule"]
    if rule not in RULES and not _OWN.fullmatch(rule):
        raise UserError(
            f"rule = {rule}: expected one of {', '.join(RULES)}, or your own as package.module:function."
            f"{suggest(rule, RULES)}"
        )


def _check_generator(values: Mapping[str, Any]) -> None:
    if values.get("use_vllm") and values.get("use_transformers_continuous_batching"):
        raise UserError("use_vllm and use_transformers_continuous_batching are both true: choose one generator.")
    cast = next((key for key in ("bf16", "fp16") if values.get(key)), None)
    if values.get("use_transformers_continuous_batching") and cast and values.get("dtype") == "float32":
        raise UserError(
            f"use_transformers_continuous_batching with {cast} = true: TRL would turn the trained float32 weights into "
            f"{cast} before each generation, for good. Leave {cast} out, or set dtype: bfloat16 knowingly."
        )


def _check_precision(values: Mapping[str, Any]) -> None:
    if values.get("bf16") and values.get("fp16"):
        raise UserError("bf16 and fp16 are both true: choose one, or leave both out.")
    if values.get("bf16") and values.get("use_cpu") and cpu_has_bf16() is False:
        raise UserError(
            "bf16 = true, but this processor has no bf16 instructions and would be slower than in "
            "float32: leave "
            "bf16 out (it is then used where there are some), or set bf16: false."
        )
    if values.get("load_in_4bit") and values.get("load_in_8bit"):
        raise UserError("load_in_4bit and load_in_8bit are both true: choose one.")
    quantised = next((key for key in ("load_in_4bit", "load_in_8bit") if values.get(key)), None)
    if quantised and not values.get("use_peft"):
        raise UserError(f"{quantised} = true trains adapters only: set use_peft: true as well.")
    if quantised and values.get("use_vllm"):
        raise UserError(
            f"{quantised} and use_vllm are both true: TRL would merge the adapter into the quantised weights before "
            "each generation, which rounds most of it away and wears the base off (huggingface/trl issues 3466 and "
            f"4973). Leave out {quantised} (LoRA on a bf16 base), or set use_vllm: false."
        )


def _check_task(values: Mapping[str, Any]) -> None:
    for name, weight in (values["task_rewards"] or {}).items():
        if name not in REWARDS and not _OWN.fullmatch(name):
            raise UserError(
                f"task_rewards: unknown reward {name}: expected {', '.join(REWARDS)}, or your own as "
                f"package.module:function.{suggest(str(name), REWARDS)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise UserError(f"task_rewards: {name}: got {describe(weight)}, expected a weight, such as 1.0.")
    _check_task_source(values)
    for key in ("dataset_name", "dataset_test_name"):
        if values[key] is not None:
            _check_data(key, values[key], values)


def _check_task_source(values: Mapping[str, Any]) -> None:
    """Whether the task is known, and what it reads is given and there."""
    task = values["task"]
    if task not in TASKS:
        if _OWN.fullmatch(task):
            return
        raise UserError(
            f"task = {task}: expected one of {', '.join(TASKS)}, or your own as package.module:function."
            f"{suggest(task, TASKS)}"
        )
    if values["dataset_name"] and (task in _GENERATED or task == "sciknoweval_chemistry"):
        reads = "generates its prompts" if task in _GENERATED else "has a form of its own (data_dir or the hub)"
        raise UserError(f"task = {task} {reads}, so it reads no dataset_name: set task: dataset (or gsm8k).")
    if task == "dataset" and not values["dataset_name"]:
        raise UserError("task = dataset needs dataset_name: a JSONL or parquet file, a directory or hub id.")
    if values["data_dir"] is not None:
        _check_data_dir(values)
    if values["task_options"] is not None and task != "reasoning_gym":
        raise UserError(f"task = {task} reads no task_options: leave it out, or set task: reasoning_gym.")
    if task == "reasoning_gym":
        if "dataset" not in (values["task_options"] or {}):
            raise UserError("task = reasoning_gym needs task_options with its data set, as in {dataset: chain_sum}.")
        if find_spec("reasoning_gym") is None:
            raise UserError("task = reasoning_gym is not installed: pip install 'pods-rl[reasoning-gym]'.")


def _check_data_dir(values: Mapping[str, Any]) -> None:
    task, folder = values["task"], values["data_dir"]
    if task in (*_GENERATED, "dataset"):
        instead = "generates its prompts" if task in _GENERATED else "is named by dataset_name"
        raise UserError(f"task = {task} {instead}, so it reads no data_dir: leave it out.")
    if values["dataset_name"]:
        raise UserError("data_dir and dataset_name both say where the task is: leave one of them out.")
    if not local_path(folder).is_dir():
        raise UserError(f"data_dir = {folder}: there is no such folder (looked in {Path.cwd()}).")


def _check_data(key: str, name: str, values: Mapping[str, Any]) -> None:
    path = local_path(name)
    if not path.exists():
        if looks_like_path(name) or path.suffix in _DATA_FILES:
            raise UserError(f"{key} = {name}: there is no such file or directory (looked in {Path.cwd()}).")
        return
    if path.suffix == ".jsonl":
        check_rows(key, path, values)


def _check_model(values: Mapping[str, Any]) -> None:
    name = values["model_name_or_path"]
    if name is None:
        raise UserError(
            f"model_name_or_path is not set: give a local path, a hub id, or {TINY} (the policy shipped "
            "for the "
            "arithmetic task)."
        )
    path = local_path(name)
    if name == TINY or (not path.exists() and not looks_like_path(name)):
        return
    if not path.is_dir():
        raise UserError(f"model_name_or_path = {name}: there is no such directory (looked in {Path.cwd()}).")
    if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise UserError(f"model_name_or_path = {name}: holds no config.json, so it is no saved model.")


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a path: a hub id is ``name`` or ``owner/name``.

    >>> looks_like_path("./model"), looks_like_path("a/b/c"), looks_like_path("Qwen/Qwen2.5-0.5B")
    (True, True, False)
    """
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") > 1 or "\\" in name


def cpu_has_bf16() -> bool | None:
    """Whether the processor has bf16 instructions; None where the system does not say."""
    info = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not info.is_file():
        return None
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(errors="replace"), re.MULTILINE)
    wanted = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
    return bool(wanted & set(match[1].split())) if match else None
