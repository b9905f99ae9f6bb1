"""Keys that a recipe sets and that no part of its run reads, because of its other keys.

A key of the task, the policy or the loss that would silently change nothing is refused. A key that only another
setting of the same recipe switches off is noted: a base file, or a recipe tried without vLLM, sets such keys for good
reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engines.trl.batching import batch_plan
from ..errors import UserError
from ..policies import SHIPPED
from ..text import describe
from .catalog import local_path
from .schema import GYM, fields

Values = Mapping[str, Any]

_GENERATED = ("arithmetic", "words", "countdown", GYM)  # tasks without data
_PUBLISHED = ("gsm8k", "math", "amc23")
_CHEMISTRY = "sciknoweval_chemistry"
# the tasks that read each of these keys; a task of the user's own may read any
_READERS = {
    "dataset_name": ("dataset",),
    "dataset_config": ("dataset",),
    "dataset_test_name": ("dataset",),
    "dataset_train_split": ("dataset", *_PUBLISHED),
    "question_column": ("dataset", *_PUBLISHED),
    "answer_column": ("dataset", *_PUBLISHED),
    "data_dir": (*_PUBLISHED, _CHEMISTRY),
    "task_options": (GYM,),
    "task_difficulty": ("arithmetic", "words", "countdown"),
    "task_seed": _GENERATED,
}


@dataclass(frozen=True)
class _Needs:
    """Keys that are read only if other keys of the recipe have certain values.

    Args:
        keys: their names, or how they begin, with a `*` at the end.
        is_read: whether the recipe's values make a run read them.
        remedy: what to set so that they are read.
    """

    keys: str
    is_read: Callable[[Values], bool]
    remedy: str

    def names(self) -> list[str]:
        names: list[str] = []
        for word in self.keys.split():
            start = word.removesuffix("*")
            names += [name for name in fields() if name == word or (start != word and name.startswith(start))]
        return names


def _uses(key: str) -> Callable[[Values], bool]:
    return lambda values: bool(values.get(key))


def _uses_vllm(mode: str) -> Callable[[Values], bool]:
    return lambda values: not values.get("use_vllm") or values.get("vllm_mode", "colocate") == mode


_REFUSED = (
    _Needs("lora_* use_rslora use_dora", _uses("use_peft"), "use_peft: true"),
    _Needs("bnb_4bit_* use_bnb_nested_quant", _uses("load_in_4bit"), "load_in_4bit: true"),
    _Needs("sync_ref_model", _uses("beta"), "beta above 0, since there is no reference model without a KL term"),
    _Needs("ref_model_mixup_alpha ref_model_sync_steps", _uses("sync_ref_model"), "sync_ref_model: true"),
    _Needs(
        "transformers_continuous_batching_config",
        lambda values: bool(values.get("use_transformers_continuous_batching") or values.get("use_transformers_paged")),
        "use_transformers_continuous_batching: true",
    ),
)
_NOTED = (
    _Needs("vllm_*", _uses("use_vllm"), "use_vllm: true"),
    _Needs(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
        _uses_vllm("server"),
        "vllm_mode: server",
    ),
    _Needs(
        "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size vllm_enable_sleep_mode",
        _uses_vllm("colocate"),
        "vllm_mode: colocate",
    ),
    _Needs(
        "rule",
        lambda values: values["num_rollouts"] > values["num_generations"] or values["selection"] == "batch",
        "num_rollouts above num_generations",
    ),
    _Needs(
        "selection",
        lambda values: values["selection"] == "prompt" or batch_plan(values).prompts_per_generation > 1,
        "num_prompts or more rows, because a generation of one prompt has nothing to choose between",
    ),
    _Needs("dynamic_sampling_rounds", _uses("dynamic_sampling"), "dynamic_sampling: true"),
    _Needs("sapo_*", lambda values: values["loss_type"] == "sapo", "loss_type: sapo"),
    _Needs("vespo_*", lambda values: values["loss_type"] == "vespo", "loss_type: vespo"),
    _Needs(
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        _uses("use_adaptive_entropy"),
        "use_adaptive_entropy: true",
    ),
    _Needs(
        "warmup_steps",
        lambda values: values["lr_scheduler_type"] != "constant",
        "lr_scheduler_type: constant_with_warmup",
    ),
    _Needs("num_completions_to_print log_unique_prompts", _uses("log_completions"), "log_completions: true"),
    _Needs("hub_model_id hub_private_repo hub_revision", _uses("push_to_hub"), "push_to_hub: true"),
    _Needs("fsdp_config", _uses("fsdp"), "fsdp"),
    _Needs(
        "eval_seconds eval_repeats eval_temperature eval_batch_size",
        lambda values: values["eval_prompts"] != 0,
        "eval_prompts to null or above 0",
    ),
)


def check_keys_of_task(values: Values, family: str) -> None:
    """Raise UserError for a key of the resolved recipe that its task, or its library `reasoning_gym`, does not read."""
    for key, readers in _READERS.items():
        if values[key] == fields()[key].default or family in readers:
            continue
        raise UserError(
            f"task = {values['task']} does not read {key}: unset one of them. Tasks that read it: {', '.join(readers)}."
        )
    name = values["dataset_name"]
    if values["dataset_config"] is not None and name and local_path(name).is_file():
        raise UserError(
            f"dataset_config = {values['dataset_config']} names a part of a data set of the hub, and dataset_name = "
            f"{name} is a file: unset dataset_config."
        )


def check_read(values: Values, given: Values) -> None:
    """Raise UserError for a key that a recipe sets, not to its default, although its run would not read it."""
    for needs in _REFUSED:
        for key in _unread(needs, values, given):
            raise UserError(
                f"{key} = {describe(given[key])} would change nothing: set {needs.remedy}, or remove {key} (its "
                f"default is {describe(fields()[key].default)})."
            )
    name = str(values["model_name_or_path"])
    if not _has_default("model_revision", given) and (name in SHIPPED or local_path(name).is_dir()):
        raise UserError(
            f"model_revision = {given['model_revision']} is of a model on the hub, and model_name_or_path = {name} is "
            "a local folder: remove model_revision, or name the model of the hub."
        )


def unread_notes(values: Values, given: Values) -> list[str]:
    """Return a note for each setting that makes a run ignore keys of its recipe; arguments as of `check_read`."""
    notes = []
    for needs in _NOTED:
        keys = _unread(needs, values, given)
        if keys:
            notes.append(f"{', '.join(keys)} would be read only with {needs.remedy}: this run ignores what is set.")
    return notes


def _unread(needs: _Needs, values: Values, given: Values) -> list[str]:
    if needs.is_read(values):
        return []
    return [key for key in needs.names() if not _has_default(key, given)]


def _has_default(key: str, given: Values) -> bool:
    return key not in given or given[key] == fields()[key].default
