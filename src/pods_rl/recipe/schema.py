"""Every key a recipe may hold: ours, in the table below, and TRL's, read from its source. No torch."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from typing import Any

from ..planning.losses import ADVANTAGES, BASELINES
from .extras import REPORTERS
from .fields import Field, parse_annotation
from .trl_source import trl_fields

RULES = ("max_variance", "max_reward", "random", "percentile")
REWARDS = (
    "accuracy", "format", "tag_count", "choice", "equation", "chemistry", "countdown", "positions", "overlong",
)  # fmt: skip
TASKS = (
    "arithmetic", "countdown", "sorting", "gsm8k", "math", "amc23", "sciknoweval_chemistry", "dataset",
    "reasoning_gym",
)  # fmt: skip
TINY = "tiny"  # the policy shipped with the package

# name, type, default, where the default is from, help; one section a part of the run that reads it
_ENGINE = (
    ("num_rollouts", "int | None", None, "num_generations",
     "n: rollouts generated per prompt, at least m = num_generations, the rows trained on. null: n = m, "
     "plain GRPO."),
    ("rule", "str", "max_variance", "paper, section 3.1",
     "Which m of the n rollouts to keep: max_variance, max_reward, random, percentile, or your own as "
     "package.module:function."),
    ("advantages", "str", "after", "paper, section 3.2",
     "Normalise advantages over the m kept rollouts (after) or over all n (before)."),
    ("advantage_baseline", "str", "mean", "GRPO",
     "What is taken off each reward: the mean of the group, or leave_one_out, the mean of the others (RLOO; with "
     "scale_rewards: none or batch)."),
    ("reward_errors", "str", "raise", "a fault of a reward is no zero",
     "What becomes of a rollout whose reward raises or takes too long: raise (the run ends and names it), zero (it "
     "scores 0), drop (it is unscored: not selected while others are, advantage 0)."),
    ("rollout_batch_size", "int | None", None, "all at once",
     "Most rollouts generated at once on each process; lower it where generation runs out of memory. With "
     "colocated vLLM its max_num_seqs; a vLLM server has a setting of its own."),
    ("skip_zero_advantage_steps", "bool", True, "nothing to learn",
     "Leave the weights alone in a step whose advantages are all zero, where nothing else has a gradient (a KL "
     "term, an entropy bonus); false: momentum and decay still move them, as in TRL."),
    ("trim_padding", "bool", True, "less to compute",
     "Cut each micro-batch to its own longest row."),
    ("sort_by_length", "bool", True, "less to compute",
     "Put rows of like length into one micro-batch; the gradient of the step stays the same."),
)  # fmt: skip
_TASK = (
    ("task", "str", "arithmetic", "needs no download",
     f"What to train on: {', '.join(TASKS)} (dataset: your own prompts and answers; `pods tasks` says what "
     "each is), or a function of your own as package.module:function."),
    ("task_difficulty", "str", "mixed", "the tiny policy's own",
     "arithmetic, countdown, sorting: easy, mixed or hard."),
    ("task_options", "dict[str, Any] | None", None, "",
     "reasoning_gym: the data set and its own options, as in {dataset: chain_sum, max_terms: 4}."),
    ("task_train_size", "int | None", None, "the whole split",
     "Use so many training prompts, the first ones; generated tasks make as many (4096 where null)."),
    ("task_test_size", "int | None", None, "the whole split",
     "Use so many test prompts, the first ones; generated tasks make as many (512 where null)."),
    ("task_seed", "int", 0, "one task for all seeds",
     "Seed of generated prompts. Apart from seed, so that runs of different seeds train on the same task."),
    ("data_dir", "str | None", None, "the hub",
     "gsm8k, math, amc23, sciknoweval_chemistry: read train.jsonl and test.jsonl (chemistry: L*.jsonl) from this "
     "folder, or its folder gsm8k, math500, ..., instead of the hub; the prompts are the same."),
    ("dataset_name", "str | None", None, "",
     "A JSONL or parquet file, a directory, or a hub id, with the training prompts."),
    ("dataset_config", "str | None", None, "",
     "Configuration of dataset_name, where it is a hub data set."),
    ("dataset_train_split", "str", "train", "hub custom",
     "Split of dataset_name to train on."),
    ("dataset_test_split", "str", "test", "hub custom",
     "Split to evaluate on."),
    ("dataset_test_name", "str | None", None, "dataset_name",
     "File, directory or hub id with the test prompts, where they are not a split of dataset_name."),
    ("question_column", "str | None", None, "the task's own",
     "Column with the question (or the chat messages)."),
    ("answer_column", "str | None", None, "the task's own",
     "Column with the gold answer."),
    ("answer_after", "str | None", None, "the task's own",
     "The gold answer starts after the last such mark, as after #### in GSM8K."),
    ("system_prompt", "str | None", None, "the task's own",
     "System message put before every question."),
    ("prompt_style", "str | None", None, "the task's own",
     "How a question becomes a prompt: chat (messages, rendered with the model's template) or plain "
     "(text). A model without a template gets text either way."),
    ("task_rewards", "dict[str, float] | None", None, "the task's own",
     "Rewards and their weights, such as {accuracy: 1.0, format: 0.1}."),
    ("task_binary", "float | None", None, "graded rewards",
     "Turn each reward into 1 where it has at least this share of its range, else 0 (1.0: full marks only)."),
    ("overlong_buffer", "int | None", None, "a fifth of max_completion_length, as in DAPO",
     "Tokens before max_completion_length over which the reward overlong falls from 0 to -1."),
    ("reward_seconds", "float | None", 60.0, "a slow judge answers, and a hang costs a minute, not the run",
     "Seconds in which a reward of your own scores one completion, in processes that are killed then; null: in the "
     "training process, without a limit. Those built in have limits of their own."),
    ("max_prompt_length", "int | None", None, "no limit; the paper has 512",
     "Leave training prompts longer than so many tokens out, and say how many there were; test prompts are "
     "counted and kept, so that the test set stays as published."),
)  # fmt: skip
_RUN = (
    ("max_seconds", "float | None", None, "",
     "Stop after so many seconds of training clock, evaluation not counted."),
    ("eval_seconds", "float | None", None, "",
     "Evaluate every so many seconds of training clock; always at the start and at the end."),
    ("save_seconds", "float | None", None, "1800 as in the paper, keeping two, where nothing is said of saving",
     "Save a checkpoint every so many seconds of training clock (save_steps: every so many steps; null, or "
     "save_strategy no: never). A run that is asked to stop saves one anyway."),
    ("eval_prompts", "int | None", None, "the whole test split, as in the paper",
     "Evaluate on the first so many test prompts; 0: never evaluate."),
    ("eval_repeats", "int", 1, "the paper has 5",
     "Completions sampled per test prompt in an evaluation."),
    ("eval_temperature", "float | None", None, "temperature, as in the paper",
     "Temperature of sampling in evaluation; 0 is greedy."),
    ("eval_batch_size", "int", 256, "fits the tiny policy",
     "Completions generated at once in an evaluation."),
    ("eval_completions", "bool", True, "to look at later",
     "Keep every completion of an evaluation under evaluations/, as parquet."),
    ("ledger_every", "int", 10, "a page of every tenth step",
     "Keep every rollout of each so-manieth step under rollouts/; 0: never."),
    ("threads", "int | None", None, "torch's own",
     "CPU threads of torch."),
)  # fmt: skip
_OURS = (("engine", _ENGINE), ("task", _TASK), ("run", _RUN))

# defaults that differ from TRL's: (value, why)
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "beta": (0.0, "paper: no KL term"),
    "epsilon": (0.2, "paper, section 3.1"),
    "lr_scheduler_type": ("constant", "paper, appendix; a wall-clock budget gives no length to decay over"),
    "logging_steps": (1, "a line of metrics.jsonl per step (TRL: 10)"),
}

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
# choices that TRL gives in prose or code only; it finds some of them wrong only after the first rollouts
_CHOICES = {
    "advantages": ADVANTAGES,
    "advantage_baseline": BASELINES,
    "reward_errors": ("raise", "zero", "drop"),
    "task_difficulty": ("easy", "mixed", "hard"),
    "prompt_style": ("chat", "plain"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static", "quantized"),
    "report_to": REPORTERS,
    "lora_task_type": ("CAUSAL_LM",),
    "log_level": _LOG_LEVELS,
    "log_level_replica": _LOG_LEVELS,
    "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "bnb_4bit_quant_storage": ("uint8", "float16", "bfloat16", "float32"),
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
}

# TRL's keys that `pods train` always writes into config.yaml, set or not: they decide what a run is
_RECORDED = (
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "weight_decay", "max_grad_norm", "temperature", "max_completion_length",
    "num_iterations", "loss_type", "beta", "epsilon", "scale_rewards", "logging_steps", "seed",
    "model_name_or_path", "dtype", "use_peft", "save_total_limit",
)  # fmt: skip

_TOOLS = "tools and environments are not supported yet: rollouts are single completions"
_CLOCK = "a recipe evaluates by training clock: use eval_seconds, eval_prompts and eval_repeats"
_RUN_DIRECTORY = "a run keeps everything in its own directory: choose it with --output"
# TRL's keys a recipe refuses, unless they have TRL's own default: what to do instead
UNSUPPORTED = {
    "output_dir": _RUN_DIRECTORY,
    "resume_from_checkpoint": "continue a run with --resume",
    "hub_token": "a recipe is saved with the run, so it must hold no secret: set HF_TOKEN in the environment",
    "max_tool_calling_iterations": _TOOLS,
    "log_multimodal": "images are not supported yet: prompts and completions are text",
    "reward_weights": "rewards and weights are one mapping here: task_rewards: {accuracy: 1.0, format: 0.1}",
    "num_generations_eval": _CLOCK,
    "per_device_eval_batch_size": "use eval_batch_size",
    **dict.fromkeys(
        ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
        "do_eval"), _CLOCK
    ),
    **dict.fromkeys(("do_train", "do_predict"), "`pods train` trains and `pods eval` evaluates"),
    "load_best_model_at_end": "it needs TRL's evaluation; checkpoints are kept under checkpoints/",
    "save_only_model": "a run cannot go on from a checkpoint without its optimizer; checkpoints/final holds the policy",
    "enable_jit_checkpoint": "SIGTERM and Ctrl-C save a checkpoint as it is",
    "auto_find_batch_size": "a smaller batch would break up the groups: set rollout_batch_size, or a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps",
    "parallelism_config": "GRPO does not support sequence parallelism",
    "use_transformers_paged": "it is deprecated: use use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "it is deprecated: use vllm_importance_sampling_clip_max",
    "local_rank": "the launcher sets it: `accelerate launch -m pods_rl train ...`",
}  # fmt: skip


@cache
def fields() -> dict[str, Field]:
    """Every known key, ours first.

    >>> fields()["num_rollouts"].section, fields()["temperature"].source
    ('engine', 'GRPOConfig')
    """
    ours = {
        name: Field(name, _kinds(kind), default=default, help=text, section=section, source=source)
        for section, rows in _OURS
        for name, kind, default, source, text in rows
    }
    known = ours | {name: field for name, field in trl_fields().items() if name not in ours}
    for name, (default, why) in _DEFAULTS.items():
        known[name] = replace(known[name], default=default, source=why)
    for name, choices in _CHOICES.items():
        known[name] = replace(known[name], choices=choices)
    known["fsdp"] = replace(known["fsdp"], kinds=known["fsdp"].kinds | {"bool"})  # its help says: pass True
    return known


def defaults() -> dict[str, Any]:
    """What a recipe is before anything is set: all of ours, and TRL's keys that decide what a run is."""
    ours = [name for _, rows in _OURS for name, *_ in rows]
    return {name: fields()[name].default for name in (*_RECORDED, *ours)}


def is_ours(name: str) -> bool:
    return any(name == row[0] for _, rows in _OURS for row in rows)


def explain(name: str) -> str:
    """Type, default and help of a key, for ``pods train --explain KEY``."""
    field = fields()[name]
    owner = "pods-rl" if is_ours(name) else "transformers / TRL"
    default = "null" if field.default is None else str(field.default)
    source = f" ({field.source})" if field.source else ""
    lines = [
        f"{name}: {field.expected}",
        f"  default  {default}{source}",
        f"  from     {owner}, part: {field.section}",
        f"  {field.help}",
    ]
    if name in UNSUPPORTED:
        lines.append(f"  Not in a recipe: {UNSUPPORTED[name]}.")
    return "\n".join(lines)


def _kinds(annotation: str) -> frozenset[str]:
    return parse_annotation(ast.parse(annotation, mode="eval").body)[0]
