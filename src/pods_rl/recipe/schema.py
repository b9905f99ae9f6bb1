"""Every key that a recipe may have, each defined once. Does not import torch.

The keys of training are those of TRL and of PODSConfig (`fields`). Those of the task and of the run are below. Then
follow the differences from TRL: defaults, refused keys, and values that TRL, transformers and torch accept although no
run can use them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .fields import Field, parse_annotation, pods_fields, trl_fields

REWARDS = (
    "accuracy", "format", "tag_count", "choice", "equation", "chemistry", "countdown", "overlong",
)  # fmt: skip
TASKS = (
    "arithmetic", "words", "countdown", "gsm8k", "math", "amc23", "sciknoweval_chemistry", "dataset",
)  # fmt: skip
GYM = "reasoning_gym"  # tasks of this library are reasoning_gym:NAME


def _key(default: Any, help: str, *, source: str = "", within: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A key: ``source`` is the origin of its default, ``within`` its interval (`Field.within`)."""
    return dataclasses.field(
        default=default, metadata={"help": help, "source": source, "within": within, "choices": choices}
    )


# fmt: off
# ruff: noqa: RUF009  (`_key` makes a dataclasses.field)
@dataclass
class TaskKeys:
    """The task: its data and rewards."""

    task: str = _key(
        "arithmetic", f"What to train on: {', '.join(TASKS)} (dataset: your own prompts and answers; `pods tasks` "
        "describes each), reasoning_gym:NAME, or a function of your own as package.module:function.",
        source="needs no download")
    task_difficulty: str = _key(
        "mixed", "arithmetic, words, countdown: easy, mixed or hard.",
        source="the tiny policy's own", choices=("easy", "mixed", "hard"))
    task_options: dict[str, Any] | None = _key(
        None, "reasoning_gym:NAME: options of the data set, as in {max_terms: 4}.")
    task_train_size: int | None = _key(
        None, "Number of training prompts to use, from the first. If null, the full split; generated tasks make 4096.",
        source="the full split", within="[1, inf)")
    task_test_size: int | None = _key(
        None, "Number of test prompts to use, from the first. If null, the full split; generated tasks make 512.",
        source="the full split", within="[1, inf)")
    task_seed: int = _key(
        0, "Seed of generated prompts. Separate from seed, so that runs of different seeds train on the same task.",
        source="one task for all seeds", within="[0, 4294967295]")
    data_dir: str | None = _key(
        None, "gsm8k, math, amc23, sciknoweval_chemistry: read from the folders gsm8k, math, math500, ... in this "
        "folder instead of the hub; the prompts are the same.",
        source="the hub")
    dataset_name: str | None = _key(
        None, "A JSONL or parquet file, a directory, or a hub id, with the training prompts.")
    dataset_config: str | None = _key(None, "Configuration of dataset_name, if it is a data set of the hub.")
    dataset_train_split: str = _key("train", "Split of dataset_name to train on.", source="hub custom")
    dataset_test_name: str | None = _key(
        None, "The test prompts: a split of dataset_name, as in validation or train[90%:], or another file, directory "
        "or hub id (owner/name).", source="the split test of dataset_name")
    question_column: str | None = _key(
        None, "Column with the question (or the chat messages).", source="the task's own")
    answer_column: str | None = _key(None, "Column with the gold answer.", source="the task's own")
    system_prompt: str | None = _key(
        None, "System message put before every question.", source="none for a shipped policy, else the task's own")
    prompt_style: str | None = _key(
        None, "How a question becomes a prompt: chat (messages, rendered with the model's template) or plain (text). A "
        "model without a template gets text either way.", source="plain for a shipped policy, else the task's own",
        choices=("chat", "plain"))
    task_rewards: dict[str, float] | None = _key(
        None, "Rewards and their weights, such as {accuracy: 1.0, format: 0.1}.", source="the task's own")
    reward_seconds: float | None = _key(
        60.0, "Timeout in seconds for a reward of your own to score one completion; its process is then killed. If "
        "null, score in the training process, without a timeout. Built-in rewards have timeouts of their own.",
        source="enough for a slow judge, and a hang costs a minute, not the run", within="(0, 1e9]")
    max_prompt_length: int | None = _key(
        None, "Skip training prompts of more tokens than this, and log how many; test prompts are counted and kept, so "
        "that the test set stays as published.", source="no limit; the paper has 512", within="[1, inf)")


@dataclass
class RunKeys:
    """How long a run trains, and what it evaluates, saves and keeps."""

    max_seconds: float | None = _key(
        None, "Stop after this many seconds of training clock, which excludes evaluation.", within="(0, inf)")
    eval_seconds: float | None = _key(
        None, "Evaluate every this many seconds of training clock; always at the start and at the end.",
        within="(0, inf)")
    save_seconds: float | None = _key(
        None, "Save a checkpoint every this many seconds of training clock (save_steps: every N steps; null, or "
        "save_strategy no: never). A run that a signal stops saves one anyway.",
        source="1800 as in the paper, keeping two, if no key says when to save", within="(0, inf)")
    eval_prompts: int | None = _key(
        None, "Number of test prompts to evaluate on, from the first; 0: never evaluate.",
        source="the full test split, as in the paper", within="[0, inf)")
    eval_repeats: int = _key(
        1, "Completions sampled per test prompt in an evaluation.", source="the paper has 5", within="[1, 10000]")
    eval_temperature: float | None = _key(
        None, "Temperature of sampling in evaluation; 0 is greedy.", source="temperature, as in the paper",
        within="[0, inf)")
    eval_batch_size: int = _key(
        256, "Completions generated at once in an evaluation.", source="fits the tiny policy", within="[1, 1e6]")
    ledger_every: int = _key(
        10, "Keep every rollout of every Nth step under rollouts/; 0: never.", source="a page of every tenth step",
        within="[0, inf)")
    threads: int | None = _key(None, "CPU threads of torch.", source="torch's own", within="[1, 4096]")
# fmt: on


# defaults that differ from those of TRL and PODSConfig: (value, why)
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "skip_zero_advantage_steps": (True, "all arms of an experiment skip alike, plain GRPO too"),
    "beta": (0.0, "paper: no KL term"),
    "epsilon": (0.2, "paper, section 3.1"),
    "lr_scheduler_type": ("constant", "paper, appendix; a wall-clock budget gives no length to decay over"),
    "logging_steps": (1.0, "a line of metrics.jsonl per step (TRL: 10)"),
}

# ranges that no library checks before a policy is loaded: for each interval, its keys
_UNCHECKED_RANGES = {
    "[1, 1e9]": "num_iterations max_completion_length pad_to_multiple_of ref_model_sync_steps lora_r lora_alpha "
    "save_total_limit num_completions_to_print vllm_tensor_parallel_size max_tool_calling_iterations "
    "vllm_max_model_length ddp_timeout",
    "(0, inf)": "epsilon delta sapo_temperature_neg sapo_temperature_pos vllm_importance_sampling_clip_max save_steps "
    "tool_timeout vllm_server_timeout num_train_epochs",
    "[0, inf)": "beta epsilon_high weight_decay max_grad_norm logging_steps dataloader_num_workers",
    "[0, 1]": "top_entropy_quantile ref_model_mixup_alpha label_smoothing_factor",
    "(0, 1]": "top_p vllm_gpu_memory_utilization",
    "[-1, 1e12]": "max_steps",
    "[0, 4294967295]": "seed data_seed",
}
# choices that TRL rejects only after the first rollouts, or never
_UNCHECKED_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "save_strategy": ("no", "steps", "epoch"),  # "best" needs TRL's evaluation
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

# TRL's keys that `pods train` always writes into config.yaml, set or not: they define a run
_RECORDED = (
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "weight_decay", "max_grad_norm", "temperature", "max_completion_length",
    "num_iterations", "loss_type", "beta", "epsilon", "scale_rewards", "logging_steps", "seed",
    "model_name_or_path", "dtype", "use_peft", "save_total_limit",
)  # fmt: skip

# TRL's keys that a recipe refuses unless they have TRL's default: what to do instead
UNSUPPORTED = {
    "output_dir": "a run keeps everything in its own directory: choose it with --output",
    "resume_from_checkpoint": "continue a run with --resume",
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "a run pushes its final policy once, at its end"),
    "hub_token": "a recipe is saved with the run, so it must hold no secret: set HF_TOKEN in the environment",
    "reward_weights": "a recipe has rewards and weights in one mapping: task_rewards: {accuracy: 1.0, format: 0.1}",
    **dict.fromkeys((
        "do_eval", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
        "per_device_eval_batch_size", "num_generations_eval",
    ), "a recipe evaluates by training clock: use eval_seconds, eval_prompts, eval_repeats and eval_batch_size"),
    "load_best_model_at_end": "it needs TRL's evaluation; checkpoints are kept under checkpoints/",
    "save_only_model": "a run cannot resume from a checkpoint without its optimizer; checkpoints/final has the policy",
    "enable_jit_checkpoint": "SIGTERM and Ctrl-C save a checkpoint without it",
    "auto_find_batch_size": "a smaller batch would break up the groups: set rollout_batch_size, or a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps",
}  # fmt: skip


@cache
def _ours() -> dict[str, Field]:
    """The keys that are not TRL's, by the part of a run that reads them."""
    found = dict(pods_fields())
    for section, keys in (("task", TaskKeys), ("run", RunKeys)):
        for key in dataclasses.fields(keys):
            kinds = parse_annotation(str(key.type))
            found[key.name] = Field(key.name, kinds, key.default, section=section, **key.metadata)
    return found


@cache
def fields() -> dict[str, Field]:
    """Return every known key, ours first.

    >>> fields()["num_rollouts"].source, fields()["temperature"].source
    ('PODSConfig', 'GRPOConfig')
    """
    known = _ours() | {name: field for name, field in trl_fields().items() if name not in _ours()}
    for name, (default, why) in _DEFAULTS.items():
        known[name] = replace(known[name], default=default, source=why)
    for name, choices in _UNCHECKED_CHOICES.items():
        known[name] = replace(known[name], choices=choices)
    for interval, names in _UNCHECKED_RANGES.items():
        known |= {name: replace(known[name], within=interval) for name in names.split()}
    known["fsdp"] = replace(known["fsdp"], kinds=known["fsdp"].kinds | {"bool"})  # its help allows True
    return known


def defaults() -> dict[str, Any]:
    """Return the default recipe: all of our keys, and the keys of TRL that define a run."""
    return {name: fields()[name].default for name in (*_RECORDED, *_ours())}


def explain(name: str) -> str:
    """Return type, default and help of a key, for ``pods train --explain KEY``."""
    field = fields()[name]
    default = "null" if field.default is None else str(field.default)
    lines = [
        f"{name}: {field.expected}",
        f"  default  {default}{f' ({field.source})' if field.source else ''}",
        f"  from     {'pods-rl' if name in _ours() else 'transformers / TRL'}, part: {field.section}",
        f"  {field.help}",
    ]
    if name in UNSUPPORTED:
        lines.append(f"  Not in a recipe: {UNSUPPORTED[name]}.")
    return "\n".join(lines)
