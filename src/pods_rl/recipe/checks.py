"""Check a resolved recipe before torch is loaded: its values, its task and policy, libraries and the hub.

TRL, transformers, PEFT and torch check the rest themselves: `training.trainer` constructs their objects before a
policy loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..text import describe, suggest
from .catalog import SHIPPED, local_path, looks_like_path
from .schema import GYM, REWARDS, TASKS

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*[.:][^\W\d]\w*")  # package.module:function
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_READERS = {  # the tasks that read each of these keys; the others generate their prompts
    "dataset_name": ("dataset",),
    "data_dir": ("gsm8k", "math", "amc23", "sciknoweval_chemistry"),
    "task_options": (GYM,),
}
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", None)  # schedules without a last step
_TIMEOUT = 1.5  # seconds; a slow hub may still answer the loaders


def check_values(values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value or combination that cannot work, except batch sizes."""
    _check_task(values)
    name = values["model_name_or_path"]
    if name is None:
        shipped = (f"{policy} (shipped, for task {task})" for policy, task in SHIPPED.items())
        raise UserError(f"model_name_or_path is not set: give a local path, a hub id, or {' or '.join(shipped)}.")
    if looks_like_path(name) and not local_path(name).is_dir():
        raise UserError(f"model_name_or_path = {name}: there is no such directory (looked in {Path.cwd()}).")
    schedule, quantised = values.get("lr_scheduler_type"), values.get("load_in_4bit") or values.get("load_in_8bit")
    endless = values.get("max_steps", -1) <= 0 and values.get("num_train_epochs") is None
    if endless and values.get("max_seconds") is None:
        raise UserError("No limit is set: set max_seconds (training clock), max_steps or both.")
    if endless and schedule not in _ENDLESS:
        raise UserError(
            f"lr_scheduler_type = {schedule} decays over a number of steps, and max_seconds gives none: set max_steps "
            "as well, or lr_scheduler_type: constant."
        )
    if values["max_completion_length"] is None:
        raise UserError("max_completion_length = null: expected a whole number of at least 1.")
    if quantised and values.get("use_vllm"):
        raise UserError(
            "load_in_4bit or load_in_8bit with use_vllm: TRL would merge the adapter into the quantised weights before "
            "each generation, which rounds most of it away and damages the base (huggingface/trl issues 3466 and "
            "4973). Unset it (LoRA on a bf16 base), or set use_vllm: false."
        )


def _check_name(key: str, name: Any, known: tuple[str, ...]) -> None:
    if name not in known and not _IMPORT_PATH.fullmatch(str(name)):
        raise UserError(
            f"{key}: unknown name {name}.{suggest(str(name), known)} Expected one of {', '.join(known)}, or your own "
            "as package.module:function."
        )


def _check_task(values: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown task or reward, and for data that are missing or that the task does not read."""
    task = values["task"]
    library = GYM if task.startswith(f"{GYM}:") else None
    if library is None:
        _check_name("task", task, TASKS)
    for name, weight in (values["task_rewards"] or {}).items():
        _check_name("task_rewards", name, REWARDS if library is None else (*REWARDS, library))
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UserError(f"task_rewards: {name}: got {describe(weight)}, expected a weight, such as 1.0.")
    for key, readers in _READERS.items():
        if values[key] is not None and (library or task in TASKS) and (library or task) not in readers:
            raise UserError(f"task = {task} does not read {key}: unset one of them.")
    for key in ("dataset_name", "dataset_test_name"):
        name = values[key]
        missing = name is not None and not local_path(name).exists()
        if missing and (looks_like_path(name) or Path(name).suffix in _DATA_FILES):
            raise UserError(f"{key} = {name}: there is no such file or directory (looked in {Path.cwd()}).")


def missing_library(values: Mapping[str, Any]) -> str | None:
    """Return a sentence on every extra of pods-rl that a recipe needs and that is missing; None if all are installed.

    transformers and TRL name any other library that is missing.
    """
    quantised = values.get("load_in_4bit") or values.get("load_in_8bit")
    needed = {
        "vllm": ("vllm", values.get("use_vllm")),
        "bitsandbytes": ("quant", quantised or re.search("8bit|bnb|paged", str(values.get("optim") or ""))),
        "deepspeed": ("deepspeed", values.get("deepspeed")),
    }
    missing = {name: extra for name, (extra, wanted) in needed.items() if wanted and find_spec(name) is None}
    how = f"pip install '.[{','.join(missing.values())}]' in a checkout"
    return f"This recipe needs {' and '.join(missing)}, not installed here: {how}." if missing else None


def check_reachable(values: Mapping[str, Any]) -> None:
    """Raise UserError if a model, a data set or a push needs the hub, and it cannot be reached or rejects the token.

    Without this check, the loaders retry for minutes, and a push fails when the run has ended.
    """
    from huggingface_hub import get_token

    for key, kind, file in (("model_name_or_path", "model", "config.json"), ("dataset_name", "dataset", "README.md")):
        name = values.get(key)
        revision = values.get("model_revision") if kind == "model" else None
        if name and name not in SHIPPED and not (local_path(name).exists() or _is_cached(name, kind, file, revision)):
            _check_hub(f"{key} = {name}")
    for key in ("push_to_hub", "log_completions_hub_repo"):
        if values.get(key) and (get_token() is None or _check_hub(key) == 401):
            raise UserError(f"{key} needs a token that the hub accepts: set HF_TOKEN, or run `hf auth login`.")


def _is_cached(name: str, kind: str, file: str, revision: str | None) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    prepared = Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")
    return prepared.is_dir() or isinstance(try_to_load_from_cache(name, file, revision=revision, repo_type=kind), str)


@cache
def _check_hub(what: str) -> int | None:
    """Return the status of a request to the hub, None if it is slow. Cached, since most arms share their model."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{what} needs the hub, and HF_HUB_OFFLINE is set: unset it, or name local files.")
    try:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        return int(get_session().get(url, headers=build_hf_headers(), timeout=_TIMEOUT).status_code)
    except Exception as error:  # its class differs between versions of the library
        if "Connect" not in type(error).__name__ or "Timeout" in type(error).__name__:
            return None
        raise UserError(
            f"{what} needs the hub, which cannot be reached ({error}): check the network, or name local files."
        ) from error
