"""Values of TRL's settings that no run can use, and that TRL, transformers and torch accept. Does not import torch.

A recipe and the configurations of both TRL engines are checked with the same two tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field
from numbers import Real
from typing import Any

from ..errors import UserError
from ..text import describe, suggest

INTERVALS = {
    # training
    "learning_rate": "[0, inf)",
    "warmup_steps": "[0, 1e12]",
    "weight_decay": "[0, inf)",
    "max_grad_norm": "[0, inf]",
    "adam_beta1": "[0, 1)",
    "adam_beta2": "[0, 1)",
    "adam_epsilon": "[0, inf)",
    "label_smoothing_factor": "[0, 1]",
    "neftune_noise_alpha": "[0, inf)",
    "router_aux_loss_coef": "[0, inf)",
    "seed": "[0, 4294967295]",
    "data_seed": "[0, 4294967295]",
    "torch_empty_cache_steps": "[1, 1e9]",
    "logging_steps": "[0, inf)",
    "save_steps": "(0, inf)",
    "save_total_limit": "[0, 1e9]",
    "dataloader_num_workers": "[0, 256]",
    "dataloader_prefetch_factor": "[1, 1000]",
    "ddp_timeout": "[1, 1e9]",
    "ddp_bucket_cap_mb": "[1, 1e9]",
    # generation
    "max_completion_length": "[1, 1e7]",
    "pad_to_multiple_of": "[1, 65536]",
    "temperature": "(0, inf)",
    "top_p": "(0, 1]",
    "top_k": "[0, inf)",
    "min_p": "[0, 1]",
    "repetition_penalty": "(0, inf)",
    "max_tool_calling_iterations": "[1, 1e9]",
    "tool_timeout": "(0, 1e9]",
    "num_completions_to_print": "[1, 1e9]",
    "vllm_server_port": "[1, 65535]",
    "vllm_group_port": "[1, 65535]",
    "vllm_server_timeout": "(0, inf)",
    "vllm_gpu_memory_utilization": "(0, 1]",
    "vllm_max_model_length": "[1, 1e9]",
    "vllm_tensor_parallel_size": "[1, 1e9]",
    "reward_tolerance": "[0, inf)",
    # the loss
    "num_iterations": "[1, 1e6]",
    "beta": "[0, inf)",
    "epsilon": "(0, inf)",
    "epsilon_high": "[0, inf)",
    "delta": "(0, inf)",
    "top_entropy_quantile": "[0, 1]",
    "entropy_coef": "(-inf, inf)",
    "entropy_coef_min": "(-inf, inf)",
    "entropy_coef_max": "(-inf, inf)",
    "entropy_coef_delta": "[0, inf)",
    "entropy_target": "[0, inf)",
    "off_policy_mask_threshold": "(-inf, inf)",
    "sapo_temperature_neg": "(0, inf)",
    "sapo_temperature_pos": "(0, inf)",
    "vespo_k_pos": "[0, inf)",
    "vespo_lambda_pos": "[0, inf)",
    "vespo_k_neg": "[0, inf)",
    "vespo_lambda_neg": "[0, inf)",
    "vllm_importance_sampling_clip_min": "[0, inf)",
    "vllm_importance_sampling_clip_max": "(0, inf)",
    "vllm_importance_sampling_cap": "(0, inf)",
    "ref_model_mixup_alpha": "[0, 1]",
    "ref_model_sync_steps": "[1, 1e9]",
}
"""By setting, the interval of its value; a bracket includes its end."""

CHOICES = {
    "selection": ("prompt", "batch"),
    "advantages": ("after", "before"),
    "reward_errors": ("raise", "zero", "drop"),
    "clock": ("wall", "cpu"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
"""By setting of ours and of TRL, its values. TRL rejects others only after the first rollouts, or never."""

MAPPINGS = (
    "model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs", "lr_scheduler_kwargs", "transformers_continuous_batching_config",
)  # fmt: skip
"""Settings that are a mapping; of other values transformers reports some, and only when training begins."""

_NONE_TURNS_OFF = ("max_grad_norm", "top_k", "top_p")  # whose annotation does not say so


def check_bounds(settings: Mapping[str, Any], fields: Iterable[Field[Any]]) -> None:
    """Raise UserError for a number or a choice of a configuration that no run can use.

    Args:
        settings: the values of a configuration by name.
        fields: of its class; their annotations say which values may be None or text, and which are whole numbers.

    >>> from dataclasses import dataclass, fields
    >>> @dataclass
    ... class Config:
    ...     beta: float = 0.0
    >>> check_bounds({"beta": -1}, fields(Config))
    Traceback (most recent call last):
    pods_rl.errors.UserError: beta = -1: expected a number in [0, inf).
    """
    for field in fields:
        key = field.name
        kinds = str(field.type)
        value = settings.get(key)
        # transformers' parser of arguments takes "None" out of the annotations of the class that it parses.
        if value is None and ("None" in kinds or field.default is None or key in _NONE_TURNS_OFF):
            continue
        if key in INTERVALS and not (isinstance(value, str) and "str" in kinds):
            check_number(key, value, whole="float" not in kinds)
        elif key in CHOICES and value not in CHOICES[key]:
            if key == "scale_rewards" and isinstance(value, bool):  # TRL reads them as group and none
                continue
            near = suggest(str(value), CHOICES[key])
            raise UserError(f"{key} = {describe(value)}: expected one of {', '.join(CHOICES[key])}.{near}")


def check_mappings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that should be a mapping, or its JSON, and is not."""
    for key in MAPPINGS:
        value = settings.get(key)
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, (dict, type(None))):
            raise UserError(f"{key} = {describe(value)}: expected a mapping, as in {{a: 1}}, or its JSON.")


def check_number(key: str, value: Any, *, whole: bool = False, within: str = "") -> None:
    """Raise UserError unless a value is a number in the interval of its key; `within` names the mapping that has it."""
    interval = INTERVALS[key]
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond all floats
            number = float(value)
            if inside(number, interval) and (not whole or number.is_integer()):
                return
    expected = "a whole number" if whole else "a number"
    raise UserError(f"{within}{key} = {describe(value)}: expected {expected} in {interval}.")


def inside(value: Any, interval: str) -> bool:
    """Return whether a number lies in an interval; a bracket includes its end, a parenthesis does not.

    >>> inside(1, "(0, 1]"), inside(0, "(0, 1]"), inside(float("nan"), "[0, inf)")
    (True, False, False)
    """
    low, high = map(float, interval[1:-1].split(","))
    if value == low:
        return interval.startswith("[")
    if value == high:
        return interval.endswith("]")
    return bool(low < value < high)
