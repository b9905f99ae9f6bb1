"""Whether a run directory and a checkpoint belong to one run: compared before a record of the run is removed.

A run has a token. It is in `environment.json` (`run`) and in the `trainer_state.json` of each of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .files import ENVIRONMENT, read_mapping

TOKEN = "run"  # the field of `environment.json`
MODULES = "modules"
"""The key of the contents of a run that has the hashes of the user's modules, once the run has imported them."""
_TRAINER_STATE = "trainer_state.json"
_STATE_KEY = "pods_recorder"  # the key of a run's state in the trainer state of a checkpoint


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
# more of them, which are arguments of a script only
_FREE_OF_SCRIPTS = frozenset((
    "output_dir", "do_train", "do_eval", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start",
    "eval_accumulation_steps", "per_device_eval_batch_size", "num_generations_eval", "prediction_loss_only",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "hub_token", "hub_strategy",
    "hub_always_push", "resume_from_checkpoint",
))  # fmt: skip


def token_of(run: Path) -> str | None:
    """Return the token of a run, or None if its `environment.json` cannot be read."""
    token: str | None = read_mapping(run / ENVIRONMENT).get(TOKEN)
    return token


def keep_state(callbacks: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Put the state of a run into `stateful_callbacks`, which transformers saves with the next checkpoint."""
    callbacks[_STATE_KEY] = dict(state)


def kept_state(callbacks: Any) -> dict[str, Any]:
    """Return the state of a run in the `stateful_callbacks` of a trainer state; empty if there is none."""
    state = callbacks.get(_STATE_KEY) if isinstance(callbacks, Mapping) else None
    return dict(state) if isinstance(state, Mapping) else {}


def is_of_other_run(checkpoint: Path, token: str | None) -> bool:
    """Return whether another run than the one with this token (`token_of`) saved a checkpoint.

    Without a trainer state, or with an unknown token, this is not known: the answer is False.
    """
    if token is None or not (checkpoint / _TRAINER_STATE).is_file():
        return False
    state = kept_state(read_mapping(checkpoint / _TRAINER_STATE).get("stateful_callbacks"))
    return token != str(state.get("token") or "")


def check_token(run: Path, step: int, token: str) -> None:
    """Raise UserError if another run than the one in a directory saved the checkpoint of a step with this token."""
    held = token_of(run)
    if step and held is not None and held != token:
        raise UserError(
            f"{run} holds another run than the one that saved the checkpoint of step {step}. Its records stay as they "
            "are. Choose the directory of the run that saved the checkpoint, or a new one."
        )


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each setting of a script that differs from `config.yaml` of the run that it continues, with both values.

    >>> changed_settings({"seed": 1, "max_steps": 4}, {"seed": 2, "max_steps": 8})
    ['seed (saved 1, now 2)']
    """
    changes = []
    for key in {**saved, **now}:
        if key not in FREE | _FREE_OF_SCRIPTS and saved.get(key) != now.get(key):
            changes.append(f"{key} (saved {saved.get(key)}, now {now.get(key)})")
    return changes


def changed_contents(saved: object, now: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """Return each key whose contents differ, with the files: those that changed, are missing or are new.

    Only keys with contents on both sides are compared, and of `MODULES` only modules on both sides: what else a process
    has imported, such as a debugger, does not matter.

    Args:
        saved: what a run has written; anything but a mapping counts as nothing, as in a damaged file.
        now: of what the run would use now (`recipe.contents_of`).

    >>> changed_contents({"data_dir": {"gsm8k/train.jsonl": "3f"}}, {"data_dir": {"gsm8k/train.jsonl": "a0"}})
    ['data_dir (gsm8k/train.jsonl)']
    """
    changes: list[str] = []
    if not isinstance(saved, Mapping):
        return changes
    for key, files in now.items():
        saved_files = saved.get(key)
        if not isinstance(saved_files, Mapping):
            continue
        names = []
        compared = saved_files.keys() & files.keys() if key == MODULES else {*saved_files, *files}
        for name in sorted(compared):
            if name in files and files[name] is None:  # its hash was not computed
                continue
            if saved_files.get(name) != files.get(name):
                names.append(name)
        if names:
            listed = ", ".join(names[:3])
            if len(names) > 3:
                listed += f" and {len(names) - 3} more"
            changes.append(f"{key} ({listed})")
    return changes
