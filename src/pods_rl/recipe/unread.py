"""Refuse keys of the task, the policy or the loss that a run would not read, because of its other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..policies import SHIPPED
from ..text import describe
from .catalog import local_path
from .schema import GYM, fields

Values = Mapping[str, Any]

WITHOUT_DATA = ("arithmetic", "words", GYM)  # tasks without data
_PUBLISHED = ("gsm8k", "math", "amc23")
# the tasks that read each of these keys; a task of the user's own may read any
_READERS = {
    "dataset_name": ("dataset",),
    "dataset_config": ("dataset",),
    "dataset_test_name": ("dataset",),
    "dataset_train_split": ("dataset", *_PUBLISHED),
    "question_column": ("dataset", *_PUBLISHED),
    "answer_column": ("dataset", *_PUBLISHED),
    "data_dir": (*_PUBLISHED, "sciknoweval_chemistry"),
    "task_options": (GYM,),
    "task_difficulty": ("arithmetic", "words"),
    "task_seed": WITHOUT_DATA,
}


# how keys begin, the keys of which one must be set for a run to read them, and what to set
_NEEDS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("lora_", "use_rslora", "use_dora"), ("use_peft",), "use_peft: true"),
    (("bnb_4bit_", "use_bnb_nested_quant"), ("load_in_4bit",), "load_in_4bit: true"),
    (("sync_ref_model",), ("beta",), "beta above 0: only a KL term reads the reference model"),
    (("ref_model_mixup_alpha", "ref_model_sync_steps"), ("sync_ref_model",), "sync_ref_model: true"),
    (
        ("transformers_continuous_batching_config",),
        ("use_transformers_continuous_batching", "use_transformers_paged"),
        "use_transformers_continuous_batching: true",
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
    for starts, needed, remedy in _NEEDS:
        if any(values.get(key) for key in needed):
            continue
        for key in given:
            if key.startswith(starts) and not _has_default(key, given):
                raise UserError(
                    f"{key} = {describe(given[key])} would change nothing: set {remedy}, or remove {key} (its default "
                    f"is {describe(fields()[key].default)})."
                )
    name = str(values["model_name_or_path"])
    if not _has_default("model_revision", given) and (name in SHIPPED or local_path(name).is_dir()):
        raise UserError(
            f"model_revision = {given['model_revision']} is of a model on the hub, and model_name_or_path = {name} is "
            "a local folder: remove model_revision, or name the model of the hub."
        )


def _has_default(key: str, given: Values) -> bool:
    return key not in given or given[key] == fields()[key].default
