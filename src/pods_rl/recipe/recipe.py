"""A recipe: the resolved and checked settings of a run, and their comparison with stored ones.

Does not import torch. The checks here are those of values, task and policy, libraries and the hub. TRL, transformers,
PEFT and torch check the rest themselves: `training.checks` constructs their objects before a policy loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..engines.trl.batching import BatchPlan, batch_plan
from ..engines.versions import check_versions
from ..errors import UserError
from ..masking import mask_secrets
from ..policies import SHIPPED
from ..runs.files import check_regular
from ..runs.identity import FREE
from ..text import describe, short, suggest
from ..yaml_files import Origin, dump_yaml
from .catalog import local_path, looks_like_path, read_recipe
from .schema import GYM, REWARDS, TASKS, UNSUPPORTED, defaults, fields
from .unread import WITHOUT_DATA, check_keys_of_task, check_read

_MOST_GENERATED = 10**6  # prompts that a task may generate; more would take minutes and gigabytes before the first step
_MAGNITUDES = (1e-6, 1e6)  # magnitudes of a reward's weight; beyond them float32 loses the other rewards
_ENDLESS = 10**9  # steps if only the clock stops the run; TRL would stop after 3 epochs
_EXTRAS = {"vllm": "vllm", "bitsandbytes": "quant", "deepspeed": "deepspeed"}  # libraries, and the extra with each
_SECTION_TITLES = {"model": "the policy", "engine": "training", "task": "the task", "run": "this run"}
_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*[.:][^\W\d]\w*")  # package.module:function
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
# the folders of `data_dir` that each task reads
DATA_FOLDERS = {
    "gsm8k": ("gsm8k",),
    "math": ("math", "math500"),
    "amc23": ("math", "amc23"),
    "sciknoweval_chemistry": ("sciknoweval_chemistry",),
}
_ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", None)  # schedules without a last step
_FILE_KEYS = ("dataset_name", "dataset_test_name", "deepspeed", "fsdp_config", "accelerator_config")  # may name a file
DATA_KEYS = ("dataset_name", "dataset_test_name", "task")  # the keys that may name data on the hub


@dataclass(frozen=True)
class Recipe:
    """The settings of a run.

    Args:
        values: every key that decides the run, resolved.
        given: the keys that the user set.
        source: the recipe's file, or its name.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    source: str

    @property
    def name(self) -> str:
        """The file's name without its ending, for naming a run.

        >>> Recipe({}, {}, "recipes/my.yaml").name, Recipe({}, {}, "gsm8k-qwen2.5-3b-pods").name
        ('my', 'gsm8k-qwen2.5-3b-pods')
        """
        return Path(self.source).name.removesuffix(".yaml").removesuffix(".yml")

    def engine_arguments(self) -> dict[str, Any]:
        """Return the keywords of PODSConfig, without ``output_dir``; with ``bf16`` only if it was set."""
        arguments = self._section("engine")
        if arguments.get("max_steps", -1) <= 0 and "num_train_epochs" not in arguments:
            arguments["max_steps"] = _ENDLESS
        return arguments

    def model_arguments(self) -> dict[str, Any]:
        """Return the keywords of TRL's ModelConfig; ``model_name_or_path`` may be ``tiny``."""
        return self._section("model")

    def task_settings(self) -> dict[str, Any]:
        """Return what ``tasks.load_task`` takes."""
        return self._section("task")

    def run_settings(self) -> dict[str, Any]:
        """Return the budget, evaluation, ledger and threads."""
        return self._section("run")

    def every_value(self) -> dict[str, Any]:
        """Return ``values``, and the default of every other key."""
        return _completed(self.values)

    def batch_plan(self, processes: int | None = None) -> BatchPlan:
        """Return the batch plan for this number of processes, by default those that the launcher started."""
        return batch_plan(self.values, processes)

    @property
    def missing_library(self) -> str | None:
        """A sentence on every extra of pods-rl that training needs and that is missing; None if all are installed.

        Reading the recipe or evaluating needs none of them. transformers and TRL name any other missing library.
        """
        values = self.values
        needed = {
            "vllm": values.get("use_vllm"),
            # optimizers of bitsandbytes are named adamw_8bit, adamw_bnb_8bit, paged_adamw_32bit and the like
            "bitsandbytes": _is_quantised(values) or re.search("8bit|bnb|paged", str(values.get("optim") or "")),
            "deepspeed": values.get("deepspeed"),
        }
        missing = [name for name, is_needed in needed.items() if is_needed and find_spec(name) is None]
        if not missing:
            return None
        extras = ",".join(_EXTRAS[name] for name in missing)
        return (
            f"This recipe needs {' and '.join(missing)}, not installed here: pip install '.[{extras}]' in a checkout."
        )

    def check_installed(self) -> None:
        """Raise UserError if a library that training needs is missing or too old."""
        check_versions()
        if self.missing_library:
            raise UserError(f"{self.source}: {self.missing_library}")

    def check_reachable(self) -> None:
        """Raise UserError if a library is missing, or if the hub is needed and cannot be reached or rejects the token.

        A model, a data set or a push may need it. Without this check, the loaders retry for half a minute, and a push
        fails when the run has ended.
        """
        self.check_installed()
        from huggingface_hub import get_token

        for key in ("model_name_or_path", "dataset_name"):
            if self._needs_hub(key):
                _check_hub(f"{key} = {self.values[key]}")
        for key in ("push_to_hub", "log_completions_hub_repo"):
            if not self.values.get(key):
                continue
            if get_token() is None or _check_hub(key) == 401:  # the hub's status for a wrong token
                raise UserError(f"{key} needs a token that the hub accepts: set HF_TOKEN, or run `hf auth login`.")

    def hub_problem(self, keys: Iterable[str]) -> str | None:
        """Return why what these keys name cannot be read from the hub; None if it can, or if the hub is not needed.

        Raises UserError for a name that no repository can have.
        """
        for key in keys:
            if not self._needs_hub(key):
                continue
            try:
                _check_hub(f"{key} = {self.values[key]}")
            except UserError as error:
                return str(error)
        return None

    def _needs_hub(self, key: str) -> bool:
        """Return whether a key names a repository on the hub that is not in the local cache."""
        value = self.values[key]
        if key == "task":  # published data are on the hub unless a folder is named
            return value in DATA_FOLDERS and not self.values["data_dir"]
        if not value or value in SHIPPED or local_path(value).exists():
            return False
        if key == "dataset_test_name" and "/" not in value:  # a split
            return False
        from huggingface_hub.errors import HFValidationError

        try:
            if key == "model_name_or_path":
                return not _is_cached(str(value), "model", "config.json", self.values.get("model_revision"))
            return not _is_cached(str(value), "dataset", "README.md", None)
        except HFValidationError as error:
            raise UserError(
                f"{key} = {short(str(value))}: there is no such local path, and no repository on the hub can have this "
                f"name ({short(str(error), 200)})."
            ) from error

    def to_yaml(self) -> str:
        """Return the resolved recipe, by section; loading it gives equal values."""
        return "".join(f"# {title}\n{dump_yaml(self._section(section))}" for section, title in _SECTION_TITLES.items())

    def _section(self, section: str) -> dict[str, Any]:
        return {key: value for key, value in self.values.items() if fields()[key].section == section}


def load_recipe(
    path_or_name: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int | None = None,
    trains: bool = True,
) -> Recipe:
    """Load a recipe from a file, or a shipped recipe by name, and check it.

    Args:
        path_or_name: a YAML file, a shipped recipe's name, or ``<experiment>-<arm>`` for one arm of a shipped
            experiment.
        overrides: values that replace the file's; text is read as the key's type, as from the command line.
        processes: the number of processes that train it, which the batches must fit. By default those that the launcher
            started.
        trains: False if it is only evaluated, so that its batches need not fit.

    Raises:
        UserError: the recipe cannot be found or read, or a key, value or combination is wrong.
    """
    return build_recipe(*read_recipe(path_or_name), overrides, processes=processes, trains=trains)


def build_recipe(
    values: Mapping[str, Any],
    origin: Origin,
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int | None = None,
    trains: bool = True,
) -> Recipe:
    """Like load_recipe, from a mapping; ``origin`` names its source in messages."""
    overrides = overrides or {}
    user_values = convert(values, origin) | convert(overrides, None)
    for key in UNSUPPORTED:
        if key not in user_values:
            continue
        # TRL's default changes nothing, so it is only removed.
        if user_values.pop(key) != fields()[key].default:
            where = "command line: " if key in overrides else origin.where(key)
            raise UserError(f"{where}{key} cannot be set in a recipe: {UNSUPPORTED[key]}.")
    for key, value in user_values.items():
        if mask_secrets({key: value}) != {key: value}:
            where = "command line: " if key in overrides else origin.where(key)
            raise UserError(f"{where}{key} holds a password or a token: {UNSUPPORTED['hub_token']}, or use ~/.netrc.")
    resolved = defaults() | user_values
    _resolve(resolved, user_values)
    try:
        _check_resolved(resolved)
        if trains:
            check_read(resolved, user_values)
            batch_plan(resolved, processes)
    except UserError as error:
        raise UserError(f"{origin.name}: {error}") from None
    return Recipe(MappingProxyType(resolved), MappingProxyType(user_values), origin.name)


def convert(values: Mapping[str, Any], origin: Origin | None) -> dict[str, Any]:
    """Convert values to their keys' types; one UserError names the unknown keys and the wrong values.

    Without an origin, the values are from the command line, and text is read as YAML.
    """
    converted: dict[str, Any] = {}
    problems: list[str] = []
    recipe_keys = fields()
    for name, value in values.items():
        key = str(name)  # YAML reads a key such as 16 or on as another type
        if key == "scale_rewards" and isinstance(value, bool):
            value = "group" if value else "none"  # as TRL reads it
        try:
            if key not in recipe_keys:
                near = suggest(key, recipe_keys) or " Neither pods-rl nor TRL has such a key."
                raise ValueError(f"unknown key.{near}")
            is_word = origin is None and isinstance(value, str)
            converted[key] = recipe_keys[key].parse(value) if is_word else recipe_keys[key].convert(value)
        except ValueError as error:
            place = "--" if origin is None else origin.where(key)
            problems.append(f"{place}{short(key)}: {error}")
    if problems:
        raise UserError("\n".join(problems))
    return converted


def _resolve(values: dict[str, Any], user_values: Mapping[str, Any]) -> None:
    """Fill in the keys that follow from other keys."""
    if values["num_rollouts"] is None:
        values["num_rollouts"] = values["num_generations"]
    if values["eval_temperature"] is None:
        values["eval_temperature"] = values["temperature"]
    if "task" not in user_values and values["dataset_name"]:
        values["task"] = "dataset"
    if values["model_name_or_path"] is None:
        for policy, task in SHIPPED.items():
            if task == values["task"]:
                values["model_name_or_path"] = policy
    if values["model_name_or_path"] in SHIPPED:  # these policies continue the question alone
        values["prompt_style"] = values["prompt_style"] or "plain"
        values["system_prompt"] = values["system_prompt"] or ""
    if not {"save_seconds", "save_steps", "save_strategy"} & user_values.keys():
        values["save_seconds"] = 1800.0  # at most half an hour is lost
        if "save_total_limit" not in user_values:
            values["save_total_limit"] = 2


def checkpoint_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe that belong to its checkpoints."""
    return {key: value for key, value in values.items() if key not in FREE}


def changed_keys(saved: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return each key whose value in a checkpoint differs from a recipe's, with both values."""
    changes = differences(checkpoint_keys(saved), checkpoint_keys(values))
    return [f"{key} (saved {was}, now {now})" for key, (was, now) in changes.items()]


def differences(saved: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each key that differs between two recipes, with both values. A missing key has its default.

    >>> differences({"seed": 1, "num_generations": 8}, {"seed": 1, "num_rollouts": 16})
    {'num_rollouts': (8, 16)}
    """
    was = _completed(saved)
    now = _completed(values)
    known = [key for key in {**saved, **values} if key in fields()]  # others are of another version of this library
    return {key: (was[key], now[key]) for key in known if was[key] != now[key]}


def _completed(user_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with every key: absent ones get their default, or a value that follows from others."""
    values = {key: field.default for key, field in fields().items()} | dict(user_values)
    _resolve(values, user_values)
    return values


# -- checks before torch is loaded -------------------------------------------------------------------------------------


def _check_resolved(values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value or combination that cannot work, except batch sizes."""
    _check_task_keys(values)
    for key in _FILE_KEYS:
        if isinstance(values.get(key), str):
            check_regular(local_path(values[key]))
    name = values["model_name_or_path"]
    if name is None:
        shipped = [f"{policy} (shipped, for task {task})" for policy, task in SHIPPED.items()]
        raise UserError(f"model_name_or_path is not set: give a local path, a hub id, or {' or '.join(shipped)}.")
    if looks_like_path(name) and not local_path(name).is_dir():
        raise UserError(f"model_name_or_path = {name}: there is no such directory (looked in {Path.cwd()}).")
    schedule = values.get("lr_scheduler_type")
    endless = values.get("max_steps", -1) <= 0 and values.get("num_train_epochs") is None
    if endless and values.get("max_seconds") is None:
        raise UserError("No limit is set: set max_seconds (training clock), max_steps or both.")
    if endless and schedule not in _ENDLESS_SCHEDULES:
        raise UserError(
            f"lr_scheduler_type = {schedule} decays over a number of steps, and max_seconds gives none: set max_steps "
            "as well, or lr_scheduler_type: constant."
        )
    if values["max_completion_length"] is None:
        raise UserError("max_completion_length = null: expected a whole number of at least 1.")
    if values.get("sync_ref_model") and values.get("use_peft"):
        raise UserError(
            "sync_ref_model with use_peft: the reference of an adapter is its base model, which does not change. Unset "
            "one of them."
        )
    if _is_quantised(values) and values.get("use_vllm"):
        raise UserError(
            "load_in_4bit or load_in_8bit with use_vllm: TRL would merge the adapter into the quantised weights before "
            "each generation, which rounds most of it away and damages the base (huggingface/trl issues 3466 and "
            "4973). Unset it (LoRA on a bf16 base), or set use_vllm: false."
        )


def _is_quantised(values: Mapping[str, Any]) -> bool:
    return bool(values.get("load_in_4bit") or values.get("load_in_8bit"))


def _check_name(key: str, name: Any, shipped: tuple[str, ...]) -> None:
    """Raise UserError unless a name is a shipped one or an import path."""
    if name not in shipped and not _IMPORT_PATH.fullmatch(str(name)):
        raise UserError(
            f"{key}: unknown name {name}.{suggest(str(name), shipped)} Expected one of {', '.join(shipped)}, or your "
            "own as package.module:function."
        )


def _check_task_keys(values: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown task or reward, and for data that are missing or that the task does not read."""
    task = values["task"]
    # A task of reasoning_gym is named reasoning_gym:NAME, and only its library is checked here.
    family = GYM if task.startswith(f"{GYM}:") else task
    if family != GYM:
        _check_name("task", task, TASKS)
    if values["task_rewards"] is not None:
        _check_reward_weights(values["task_rewards"], (*REWARDS, GYM) if family == GYM else REWARDS)
    if family in WITHOUT_DATA:
        for key in ("task_train_size", "task_test_size"):
            size = values[key]
            if size is not None and size > _MOST_GENERATED:
                raise UserError(f"{key}: got {size}, expected at most {_MOST_GENERATED:,} generated prompts.")
    if family == GYM or task in TASKS:  # a task of the user's own may read any key
        check_keys_of_task(values, family)
    for key in ("dataset_name", "dataset_test_name"):
        name = values[key]
        if name is None or local_path(name).exists():
            continue
        if looks_like_path(name) or Path(name).suffix in DATA_FILES:  # otherwise it is on the hub
            raise UserError(f"{key} = {name}: there is no such file or directory (looked in {Path.cwd()}).")


def _check_reward_weights(weights: Mapping[str, Any], shipped: tuple[str, ...]) -> None:
    """Raise UserError unless the weights of rewards can train something."""
    low, high = _MAGNITUDES
    for name, weight in weights.items():
        _check_name("task_rewards", name, shipped)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UserError(f"task_rewards: {name}: got {describe(weight)}, expected a weight, such as 1.0.")
        if weight != 0 and not low <= abs(weight) <= high:
            raise UserError(
                f"task_rewards: {name}: got {describe(weight)}, expected 0, or a magnitude of {low:g} to {high:g}."
            )
    if not any(weights.values()):
        problem = "all weights are 0" if weights else "got an empty mapping"
        raise UserError(
            f"task_rewards: {problem}, so nothing would be trained. Give a reward a weight, as in {{accuracy: 1.0}}, "
            "or remove the key for the task's own rewards."
        )


def _is_cached(name: str, kind: str, file: str, revision: str | None) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    prepared = Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")
    if prepared.is_dir():
        return True
    # A path; None or a mark of the library's if the file is not in the cache.
    return isinstance(try_to_load_from_cache(name, file, revision=revision, repo_type=kind), str)


@cache  # most arms share their model
def _check_hub(setting: str) -> int | None:
    """Return the status of a request to the hub, None if it is slow; raise UserError if it cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    with_folder = "set data_dir (--data_dir FOLDER) to a folder with its files"
    local_files = with_folder if setting.startswith("task") else "name local files"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{setting} needs the hub, and HF_HUB_OFFLINE is set: unset it, or {local_files}.")
    try:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        # 1.5 seconds: a slow hub may still answer the loaders
        return int(get_session().get(url, headers=build_hf_headers(), timeout=1.5).status_code)
    except Exception as error:  # its class differs between versions of the library
        name = type(error).__name__
        if "Connect" not in name or "Timeout" in name:
            return None
        raise UserError(
            f"{setting} needs the hub, which cannot be reached ({error}): check the network, or {local_files}."
        ) from error
