"""A recipe: the resolved and checked settings of a run, and their comparison with stored ones.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..engines.trl.batching import BatchPlan, batch_plan
from ..errors import UserError
from ..text import short, suggest
from ..yaml_files import Origin, dump_yaml
from .catalog import SHIPPED, read_recipe
from .checks import check_reachable, check_values, missing_library
from .schema import UNSUPPORTED, defaults, fields

_SAVING = frozenset(("save_seconds", "save_steps", "save_strategy"))
_SAVE_SECONDS, _SAVES_KEPT = 1800.0, 2  # if no key sets when to save: at most half an hour is lost
_ENDLESS = 10**9  # steps if only the clock stops the run; TRL would stop after 3 epochs
_TITLES = {"model": "the policy", "engine": "training", "task": "the task", "run": "this run"}

# What may change between a checkpoint and the run that resumes from it: how long, what is logged and kept, where data
# lie, how fast. Every other key decides weights, rollouts, rewards or their order, and belongs to the checkpoint.
FREE = frozenset((
    # how long
    "max_steps", "num_train_epochs", "max_seconds",
    # evaluation, the ledger, checkpoints (not the size of the test split, which belongs to the task)
    "eval_seconds", "eval_prompts", "eval_repeats", "eval_temperature", "eval_batch_size", "ledger_every",
    "save_seconds", "save_steps", "save_strategy", "save_total_limit", "save_on_each_node",
    # what is logged, and where
    "logging_steps", "logging_strategy", "logging_first_step", "log_level", "log_level_replica", "log_on_each_node",
    "log_completions", "num_completions_to_print", "log_unique_prompts", "disable_tqdm", "report_to", "run_name",
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "log_completions_hub_repo",
    "skip_memory_metrics", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision",
    # where data lie, and the machine
    "data_dir", "threads", "use_cpu", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "dataloader_persistent_workers", "torch_empty_cache_steps", "ddp_timeout",
    "vllm_gpu_memory_utilization", "vllm_server_base_url", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "vllm_group_port", "vllm_enable_sleep_mode",
))  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """``values``: every key that decides the run, resolved; ``given``: what the user set; ``source``: its file."""

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
        """Return which libraries training needs and lacks here; reading the recipe or evaluating needs none of them."""
        return missing_library(self.values)

    def check_installed(self) -> None:
        """Raise UserError if a library that training needs is missing."""
        if self.missing_library:
            raise UserError(f"{self.source}: {self.missing_library}")

    def check_reachable(self) -> None:
        """Raise UserError if a library is missing, or the model or the data set of the hub is not available."""
        self.check_installed()
        check_reachable(self.values)

    def to_yaml(self) -> str:
        """Return the resolved recipe, by section; loading it gives equal values."""
        return "".join(f"# {title}\n{dump_yaml(self._section(section))}" for section, title in _TITLES.items())

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
    given = _convert(values, origin) | _convert(overrides, None)
    for key in [key for key in UNSUPPORTED if key in given]:
        if given.pop(key) != fields()[key].default:
            where = "command line: " if key in overrides else origin.where(key)
            raise UserError(f"{where}{key} cannot be set in a recipe: {UNSUPPORTED[key]}.")
    resolved = defaults() | given
    _resolve(resolved, given)
    try:
        check_values(resolved)
        if trains:
            batch_plan(resolved, processes)
    except UserError as error:
        raise UserError(f"{origin.name}: {error}") from None
    return Recipe(MappingProxyType(resolved), MappingProxyType(given), origin.name)


def _convert(values: Mapping[str, Any], origin: Origin | None) -> dict[str, Any]:
    """Convert values to their keys' types; one UserError names the unknown keys and the wrong values.

    Without an origin, the values are from the command line, and text is read as YAML.
    """
    converted: dict[str, Any] = {}
    problems: list[str] = []
    known = fields()
    for key, value in values.items():
        if key == "scale_rewards" and isinstance(value, bool):
            value = "group" if value else "none"  # as TRL reads it
        try:
            if key not in known:
                raise ValueError(f"unknown key.{suggest(key, known) or ' Neither pods-rl nor TRL has such a key.'}")
            is_word = origin is None and isinstance(value, str)
            converted[key] = known[key].parse(value) if is_word else known[key].convert(value)
        except ValueError as error:
            problems.append(f"{'--' if origin is None else origin.where(key)}{short(key)}: {error}")
    if problems:
        raise UserError("\n".join(problems))
    return converted


def _resolve(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill in the keys that follow from other keys."""
    if values["num_rollouts"] is None:
        values["num_rollouts"] = values["num_generations"]
    if values["eval_temperature"] is None:
        values["eval_temperature"] = values["temperature"]
    if "task" not in given and values["dataset_name"]:
        values["task"] = "dataset"
    if values["model_name_or_path"] is None:
        values["model_name_or_path"] = next((name for name, task in SHIPPED.items() if task == values["task"]), None)
    if values["model_name_or_path"] in SHIPPED:  # these policies continue the question alone
        values["prompt_style"] = values["prompt_style"] or "plain"
        values["system_prompt"] = values["system_prompt"] or ""
    if not _SAVING & given.keys():
        values["save_seconds"] = _SAVE_SECONDS
        if "save_total_limit" not in given:
            values["save_total_limit"] = _SAVES_KEPT


def checkpoint_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe that belong to its checkpoints.

    >>> checkpoint_keys({"seed": 1, "max_steps": 9})
    {'seed': 1}
    """
    return {key: value for key, value in values.items() if key not in FREE}


def changed_keys(saved: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return each key whose value in a checkpoint differs from a recipe's, with both values.

    >>> changed_keys({"seed": 1, "max_steps": 9}, {"seed": 2, "max_steps": 4})
    ['seed (saved 1, now 2)']
    """
    found = differences(checkpoint_keys(saved), checkpoint_keys(values))
    return [f"{key} (saved {was}, now {now})" for key, (was, now) in found.items()]


def differences(saved: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each key that differs between two recipes, with both values. A missing key has its default.

    >>> differences({"seed": 1, "num_generations": 8}, {"seed": 1, "num_rollouts": 16})
    {'num_rollouts': (8, 16)}
    """
    was, now = _completed(saved), _completed(values)
    keys = [key for key in {**saved, **values} if key in fields()]
    return {key: (was[key], now[key]) for key in keys if was[key] != now[key]}


def _completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with every key: absent ones get their default, or a value that follows from others."""
    values = {key: field.default for key, field in fields().items()} | dict(given)
    _resolve(values, given)
    return values
