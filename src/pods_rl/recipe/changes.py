"""Whether a run may go on with a recipe: the keys that belong to a checkpoint, and those that may change. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recipe import resolve
from .schema import fields

# What may change between a checkpoint and the run that goes on from it: how long, what is told and kept, where data
# lie, how fast. Every other key decides weights, rollouts, rewards or their order, and belongs to the checkpoint.
FREE = frozenset((
    # how long
    "max_steps", "num_train_epochs", "max_seconds",
    # evaluation, the ledger, checkpoints (sizes of the test split apart: they belong to the task)
    "eval_seconds", "eval_prompts", "eval_repeats", "eval_temperature", "eval_batch_size", "eval_completions",
    "ledger_every", "save_seconds", "save_steps", "save_strategy", "save_total_limit", "save_on_each_node",
    # what is told, and where
    "logging_steps", "logging_strategy", "logging_first_step", "log_level", "log_level_replica", "log_on_each_node",
    "log_completions", "num_completions_to_print", "log_unique_prompts", "disable_tqdm", "report_to", "run_name",
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "log_completions_hub_repo",
    "skip_memory_metrics", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision",
    # where data lie, and the machine
    "data_dir", "threads", "use_cpu", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "dataloader_persistent_workers", "torch_empty_cache_steps", "ddp_timeout",
    "vllm_gpu_memory_utilization", "vllm_server_base_url", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "vllm_group_port", "vllm_enable_sleep_mode",
))  # fmt: skip


def checkpoint_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that belong to its checkpoints.

    >>> checkpoint_keys({"seed": 1, "max_steps": 9})
    {'seed': 1}
    """
    return {key: value for key, value in values.items() if key not in FREE}


def changed_keys(saved: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Each key that a checkpoint has otherwise than a recipe, with both values (``differences``).

    >>> changed_keys({"seed": 1, "max_steps": 9}, {"seed": 2, "max_steps": 4})
    ['seed (saved 1, now 2)']
    """
    found = differences(checkpoint_keys(saved), checkpoint_keys(values))
    return [f"{key} (saved {was}, now {now})" for key, (was, now) in found.items()]


def differences(saved: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each key that differs between a recipe stored by any version and one of this version, with both values.

    A key that either lacks has its default: the version that stored the recipe did not know the key. A key that this
    version does not know is skipped: nothing can set it any more.

    >>> differences({"seed": 1, "num_generations": 8, "a_removed_key": 3}, {"seed": 1, "num_rollouts": 16})
    {'num_rollouts': (8, 16)}
    """
    was, now = _completed(dict(_FORMER_DEFAULTS) | dict(saved)), _completed(values)
    keys = [key for key in {**saved, **values} if key in fields()]
    return {key: (was[key], now[key]) for key in keys if was[key] != now[key]}


# of keys that a stored recipe may lack and whose default has changed since
_FORMER_DEFAULTS = {"loss_type": "grpo"}


def _completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with every key that there is: absent ones have their default, or what follows from the others."""
    values = {key: field.default for key, field in fields().items()} | dict(given)
    resolve(values, given)
    return values
