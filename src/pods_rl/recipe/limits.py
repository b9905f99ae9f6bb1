"""What values TRL, transformers, peft and torch take, as data: they would say so only after the policy is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .fields import describe
from .reading import local_path, short
from .schema import fields

# key: interval; every key with a number has one. A bracket belongs to it, a parenthesis does not.
RANGES = {
    # ours
    "num_rollouts": "[1, 1e6]", "rollout_batch_size": "[1, inf)", "task_train_size": "[1, inf)",
    "task_test_size": "[1, inf)", "task_seed": "[0, 4294967295]", "task_binary": "(0, 1]",
    "overlong_buffer": "[1, inf)", "reward_seconds": "(0, 1e9]", "max_prompt_length": "[1, inf)",
    "max_seconds": "(0, inf)", "eval_seconds": "(0, inf)", "save_seconds": "(0, inf)", "eval_prompts": "[0, inf)",
    "eval_repeats": "[1, 10000]", "eval_temperature": "[0, inf)", "eval_batch_size": "[1, 1e6]",
    "ledger_every": "[0, inf)", "threads": "[1, 4096]",
    # how long, how fast
    "num_train_epochs": "(0, 1e9]", "max_steps": "[-1, 1e12]", "learning_rate": "[0, inf)", "warmup_steps": "[0, inf)",
    "weight_decay": "[0, inf)", "adam_beta1": "[0, 1)", "adam_beta2": "[0, 1)", "adam_epsilon": "[0, inf)",
    "max_grad_norm": "[0, inf)", "label_smoothing_factor": "[0, 1]", "neftune_noise_alpha": "[0, inf)",
    # batches
    "per_device_train_batch_size": "[1, 1e6]", "gradient_accumulation_steps": "[1, 1e6]", "num_generations": "[1, 1e6]",
    "generation_batch_size": "[1, 1e9]", "steps_per_generation": "[1, 1e6]", "num_iterations": "[1, 1e6]",
    "pad_to_multiple_of": "[1, 1e6]", "max_completion_length": "[1, 1e7]",
    # sampling
    "temperature": "(0, inf)", "top_p": "(0, 1]", "top_k": "[0, 1e9]", "min_p": "[0, 1]",
    "repetition_penalty": "(0, inf)",
    # the loss
    "beta": "[0, inf)", "epsilon": "(0, inf)", "epsilon_high": "[0, inf)", "delta": "(0, inf)",
    "sapo_temperature_neg": "(0, inf)", "sapo_temperature_pos": "(0, inf)", "vespo_k_pos": "[0, inf)",
    "vespo_lambda_pos": "[0, inf)", "vespo_k_neg": "[0, inf)", "vespo_lambda_neg": "[0, inf)",
    "top_entropy_quantile": "[0, 1]", "entropy_coef": "(-inf, inf)", "entropy_coef_min": "(-inf, inf)",
    "entropy_coef_max": "(-inf, inf)", "entropy_coef_delta": "[0, inf)", "entropy_target": "(-inf, inf)",
    "off_policy_mask_threshold": "(-inf, inf)", "router_aux_loss_coef": "[0, inf)",
    "ref_model_mixup_alpha": "[0, 1]", "ref_model_sync_steps": "[1, inf)",
    # vLLM
    "vllm_server_port": "[1, 65535]", "vllm_group_port": "[1, 65535]", "vllm_server_timeout": "(0, inf)",
    "vllm_gpu_memory_utilization": "(0, 1]", "vllm_max_model_length": "[1, inf)",
    "vllm_tensor_parallel_size": "[1, 1024]", "vllm_importance_sampling_clip_max": "(0, inf)",
    "vllm_importance_sampling_clip_min": "[0, inf)",
    # adapters
    "lora_r": "[1, 65536]", "lora_alpha": "[1, inf)", "lora_dropout": "[0, 1)",
    # seeds, logs, checkpoints, the machine
    "seed": "[0, 4294967295]", "data_seed": "[0, 4294967295]", "logging_steps": "(0, inf)", "save_steps": "(0, inf)",
    "save_total_limit": "[1, inf)", "num_completions_to_print": "[1, inf)", "torch_empty_cache_steps": "[1, inf)",
    "dataloader_num_workers": "[0, 1024]", "dataloader_prefetch_factor": "[1, 1e6]", "ddp_bucket_cap_mb": "[1, 1e6]",
    "ddp_timeout": "[1, 1e9]",
}  # fmt: skip
# what `generate` takes besides, in generation_kwargs; those above have the same ranges there
_GENERATION = {
    **{key: RANGES[key] for key in ("temperature", "top_p", "min_p", "repetition_penalty")}, "top_k": "[1, 1e9]",
    "typical_p": "(0, 1]", "epsilon_cutoff": "[0, 1)", "eta_cutoff": "[0, 1)", "top_h": "(0, 1]",
    "no_repeat_ngram_size": "[0, inf)", "encoder_no_repeat_ngram_size": "[0, inf)", "min_length": "[0, inf)",
    "max_length": "[1, inf)", "max_new_tokens": "[1, inf)", "min_new_tokens": "[0, inf)", "num_beams": "[1, inf)",
    "num_return_sequences": "[1, 1]", "max_time": "(0, inf)", "length_penalty": "(-inf, inf)",
}  # fmt: skip
# lr_scheduler_kwargs that a schedule takes, and those of which it needs one
_SCHEDULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()), "constant_with_warmup": ((), ()), "inverse_sqrt": (("timescale",), ()),
    "cosine": (("num_cycles",), ()), "cosine_with_restarts": (("num_cycles",), ()),
    "polynomial": (("lr_end", "power"), ()),
    "cosine_with_min_lr": (("num_cycles", "min_lr", "min_lr_rate"), ("min_lr", "min_lr_rate")),
    "cosine_warmup_with_min_lr": (
        ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"), ("min_lr", "min_lr_rate")
    ),
    "warmup_stable_decay": (
        ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
        ("num_decay_steps",),
    ),
}  # fmt: skip
_WHOLE_ABOVE_ONE = ("logging_steps", "save_steps", "warmup_steps")  # a number of steps, or a share of all
_NOT_NULL = ("num_generations", "max_completion_length")
_FILES = ("accelerator_config", "fsdp_config", "deepspeed")  # text names a JSON file
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_CLOCK = "a recipe evaluates by training clock"

# (the key, the value that is wrong, whether it is wrong beside the others, what to say)
_TOGETHER: tuple[tuple[str, Any, Any, str], ...] = (
    ("sync_ref_model", True, lambda v: not v.get("beta"),
     "there is no reference model with beta = 0: set beta above 0, or leave it out"),
    ("sync_ref_model", True, lambda v: v.get("use_peft"),
     "there is no reference model with use_peft, the policy without its adapter stands in: leave it out"),
    ("save_strategy", "best", lambda v: True, f"{_CLOCK}, so TRL knows no best: set steps, epoch or no"),
    ("lr_scheduler_type", "reduce_lr_on_plateau", lambda v: True, f"it needs TRL's evaluation, and {_CLOCK}"),
    ("lr_scheduler_type", "greedy", lambda v: True, f"it needs TRL's evaluation, and {_CLOCK}"),
    ("fp16_full_eval", True, lambda v: v.get("bf16_full_eval"), "bf16_full_eval is true as well: choose one"),
    ("cache_implementation", "offloaded", lambda v: v.get("use_cpu"), "it needs a GPU, and use_cpu is true"),
    ("cache_implementation", "offloaded_static", lambda v: v.get("use_cpu"), "it needs a GPU, and use_cpu is true"),
    ("fp16", True, lambda v: v.get("use_cpu"), "it needs a GPU, and use_cpu is true: set bf16, or leave it out"),
)  # fmt: skip


def check_limits(values: Mapping[str, Any]) -> None:
    """Raises UserError for the first value that is out of its range, or that its library would refuse."""
    for key, interval in RANGES.items():
        value = values.get(key)
        if isinstance(value, (int, float)) and not inside(value, interval):
            raise UserError(f"{key} = {value}: expected {in_words(interval)}.")
        if value is None and key in values and key in _NOT_NULL:
            raise UserError(f"{key} = null: expected {in_words(interval)}.")
    for key in _WHOLE_ABOVE_ONE:
        value = values.get(key) or 0
        if value > 1 and value != int(value):
            raise UserError(f"{key} = {value}: expected a whole number of steps, or a share of all below 1.")
    for key, wrong, applies, why in _TOGETHER:
        if values.get(key) == wrong and applies(values):
            raise UserError(f"{key} = {describe(wrong) if wrong is True else wrong}: {why}.")
    _check_numbers_that_go_together(values)
    _check_names(values)
    for key, value in values.items():
        if isinstance(value, str) and {"dict", "str"} <= fields()[key].kinds:
            _check_mapping(key, value)
    _check_generation(_mapping(values.get("generation_kwargs")))
    _check_schedule(str(values.get("lr_scheduler_type")), _mapping(values.get("lr_scheduler_kwargs")))


def _check_numbers_that_go_together(values: Mapping[str, Any]) -> None:
    if values.get("dataloader_prefetch_factor") is not None and not values.get("dataloader_num_workers"):
        raise UserError("dataloader_prefetch_factor needs workers: set dataloader_num_workers above 0 as well.")
    low, high = values.get("vllm_importance_sampling_clip_min"), values.get("vllm_importance_sampling_clip_max", 3.0)
    if low is not None and high is not None and low >= high:
        raise UserError(f"vllm_importance_sampling_clip_min = {low}: expected less than clip_max, {high}.")
    if values.get("entropy_coef_min", 0.0) > values.get("entropy_coef_max", 1.0):
        raise UserError("entropy_coef_min is more than entropy_coef_max: lower it.")


def _check_names(values: Mapping[str, Any]) -> None:
    attention = values.get("attn_implementation")
    if attention is not None and attention not in _ATTENTION and not re.fullmatch(r"[\w.-]+/[\w.@:-]+", attention):
        raise UserError(
            f"attn_implementation = {short(attention)}: expected one of {', '.join(_ATTENTION)}, or a kernel of "
            "the hub as owner/name."
        )
    padding = values.get("pad_to_multiple_of")
    if isinstance(padding, str) and padding != "auto":
        raise UserError(f"pad_to_multiple_of = {short(padding)}: expected a whole number, auto or null.")
    optimizer = str(values.get("optim") or "")
    if optimizer.startswith(("galore", "apollo")) and not values.get("optim_target_modules"):
        raise UserError(f"optim = {optimizer} needs optim_target_modules, the names of layers, as in [attn, mlp].")
    for part in str(values.get("optim_args") or "").replace(" ", "").split(","):
        if part and part.count("=") != 1:
            raise UserError(f"optim_args: got {short(part)}, expected names and values, as in rank=64,scale=0.5.")
    if values.get("log_completions_hub_repo") and not values.get("log_completions"):
        raise UserError("log_completions_hub_repo is set, but log_completions is false: set it to true.")


def _check_mapping(key: str, text: str) -> None:
    """Text in place of a mapping is its JSON, or names a file with it."""
    if key in _FILES and not text.lstrip().startswith("{"):
        if local_path(text).is_file():
            return
        raise UserError(
            f"{key} = {short(text)}: there is no such file: expected a mapping, or the path of a JSON file."
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{key} = {short(text)}: expected a mapping, as in {{a: 1}}, or its JSON.")


def _mapping(value: Any) -> Mapping[str, Any]:
    """A key's mapping, whether YAML or JSON; checked already."""
    return dict(json.loads(value) if isinstance(value, str) else value or {})


def _check_generation(given: Mapping[str, Any]) -> None:
    for key, interval in _GENERATION.items():
        value = given.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and inside(value, interval)):
            raise UserError(f"generation_kwargs: {key} = {short(str(value))}: expected a number, {in_words(interval)}.")


def _check_schedule(name: str, given: Mapping[str, Any]) -> None:
    if name not in _SCHEDULES:
        return
    known, needed = _SCHEDULES[name]
    for key in given:
        if key not in known:
            takes = ", ".join(known) or "nothing"
            raise UserError(f"lr_scheduler_kwargs: {short(key)}: the schedule {name} takes {takes}.")
    if needed and not any(given.get(key) is not None for key in needed):
        raise UserError(f"lr_scheduler_type = {name} needs lr_scheduler_kwargs: {{{' or '.join(needed)}: ...}}.")


def inside(value: float, interval: str) -> bool:
    """Whether a number lies in an interval.

    >>> inside(1, "(0, 1]"), inside(0, "(0, 1]"), inside(5, "[1, inf)"), inside(float("nan"), "[0, 1]")
    (True, False, True, False)
    """
    low, high = _ends(interval)
    return (value > low or (value == low and interval[0] == "[")) and (
        value < high or (value == high and interval[-1] == "]")
    )


def in_words(interval: str) -> str:
    """An interval for a message.

    >>> in_words("(0, 1]"), in_words("[1, inf)"), in_words("[0, 1)")
    ('more than 0 and at most 1', 'at least 1', 'at least 0 and less than 1')
    """
    low, high = _ends(interval)
    parts = [f"{'at least' if interval[0] == '[' else 'more than'} {_plain(low)}"] if low > -math.inf else []
    parts += [f"{'at most' if interval[-1] == ']' else 'less than'} {_plain(high)}"] if high < math.inf else []
    return " and ".join(parts) or "a number"


def _ends(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
