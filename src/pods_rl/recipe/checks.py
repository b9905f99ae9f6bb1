"""Check a resolved recipe for values that cannot work, before torch is loaded.

TRL, transformers, peft and torch check few of these themselves, and only after the policy is loaded.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..engines.trl.settings import check_losses, check_rollouts
from ..errors import UserError
from .fields import inside, interval_in_words, suggest
from .reading import local_path, short
from .schema import RULES, fields
from .task_checks import IMPORT_PATH, check_model, check_task

# generation_kwargs: arguments of `generate` that are not keys of a recipe
_GENERATION = {
    "top_k": "[1, 1e9]", "typical_p": "(0, 1]", "epsilon_cutoff": "[0, 1)", "eta_cutoff": "[0, 1)", "top_h": "(0, 1]",
    "no_repeat_ngram_size": "[0, inf)", "encoder_no_repeat_ngram_size": "[0, inf)", "min_length": "[0, inf)",
    "max_length": "[1, inf)", "max_new_tokens": "[1, inf)", "min_new_tokens": "[0, inf)", "num_beams": "[1, inf)",
    "num_return_sequences": "[1, 1]", "max_time": "(0, inf)", "length_penalty": "(-inf, inf)",
}  # fmt: skip
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty")  # the same range in generation_kwargs
# lr_scheduler_kwargs: the arguments of a schedule, and those of which one is required
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
_DECAYING = (
    "linear", "cosine", "polynomial", "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
_NOT_NULL = ("num_generations", "max_completion_length")
_WHOLE_ABOVE_ONE = ("logging_steps", "save_steps", "warmup_steps")  # a number of steps, or a fraction of all steps
_FILES = ("accelerator_config", "fsdp_config", "deepspeed")  # a string names a JSON file
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")

_CLOCK = "a recipe evaluates by training clock"
_NEEDS_GPU = "it needs a GPU, and use_cpu is true"
_CONTINUOUS = "use_transformers_continuous_batching"
# (a predicate on contradicting values, the message; {key} is the value of a key)
_CONFLICTS: tuple[tuple[Callable[[Mapping[str, Any]], Any], str], ...] = (
    (lambda v: v.get("sync_ref_model") and not v.get("beta"),
     "sync_ref_model = true: there is no reference model with beta = 0: set beta above 0, or unset sync_ref_model."),
    (lambda v: v.get("sync_ref_model") and v.get("use_peft"),
     "sync_ref_model = true: there is no reference model with use_peft, which uses the policy without its adapter: "
     "unset sync_ref_model."),
    (lambda v: v.get("save_strategy") == "best",
     f"save_strategy = best: {_CLOCK}, so TRL cannot know the best checkpoint: set steps, epoch or no."),
    (lambda v: v.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"),
     f"lr_scheduler_type = {{lr_scheduler_type}}: it needs TRL's evaluation, and {_CLOCK}."),
    (lambda v: v.get("cache_implementation") in ("offloaded", "offloaded_static") and v.get("use_cpu"),
     f"cache_implementation = {{cache_implementation}}: {_NEEDS_GPU}."),
    (lambda v: v.get("fp16") and v.get("use_cpu"),
     f"fp16 = true: {_NEEDS_GPU}: set bf16 instead, or unset fp16."),
    (lambda v: v.get("dataloader_prefetch_factor") is not None and not v.get("dataloader_num_workers"),
     "dataloader_prefetch_factor needs workers: set dataloader_num_workers above 0 as well."),
    (lambda v: v.get("entropy_coef_min", 0.0) > v.get("entropy_coef_max", 1.0),
     "entropy_coef_min is more than entropy_coef_max: lower it."),
    (lambda v: v.get("log_completions_hub_repo") and not v.get("log_completions"),
     "log_completions_hub_repo is set, but log_completions is false: set it to true."),
    (lambda v: v.get("use_vllm") and v.get(_CONTINUOUS),
     f"use_vllm and {_CONTINUOUS} are both true: choose one generator."),
    *((lambda v, cast=cast: v.get(_CONTINUOUS) and v.get(cast) and v.get("dtype") == "float32",
       f"{_CONTINUOUS} with {cast} = true: TRL would turn the trained float32 weights into {cast} before each "
       f"generation, permanently. Unset {cast}, or set dtype: bfloat16 if you want that.")
      for cast in ("bf16", "fp16")),
    (lambda v: v.get("bf16") and v.get("fp16"), "bf16 and fp16 are both true: choose one, or unset both."),
    (lambda v: v.get("bf16_full_eval") and v.get("fp16_full_eval"),
     "bf16_full_eval and fp16_full_eval are both true: choose one."),
    (lambda v: v.get("bf16") and v.get("use_cpu") and cpu_has_bf16() is False,
     "bf16 = true, but this processor has no bf16 instructions and would be slower than in float32: unset bf16 (it is "
     "then used if the processor has them), or set bf16: false."),
    (lambda v: v.get("load_in_4bit") and v.get("load_in_8bit"),
     "load_in_4bit and load_in_8bit are both true: choose one."),
    *((lambda v, bits=bits: v.get(bits) and not v.get("use_peft"),
       f"{bits} = true trains adapters only: set use_peft: true as well.")
      for bits in ("load_in_4bit", "load_in_8bit")),
    *((lambda v, bits=bits: v.get(bits) and v.get("use_vllm"),
       f"{bits} and use_vllm are both true: TRL would merge the adapter into the quantised weights before each "
       "generation, which rounds most of it away and damages the base (huggingface/trl issues 3466 and 4973). Unset "
       f"{bits} (LoRA on a bf16 base), or set use_vllm: false.")
      for bits in ("load_in_4bit", "load_in_8bit")),
)  # fmt: skip


def check_values(values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value or combination that cannot work, except batch sizes."""
    _check_ranges(values)
    for contradicts, message in _CONFLICTS:
        if contradicts(values):
            raise UserError(message.format_map(values))
    _check_single_values(values)
    for key, value in values.items():
        if isinstance(value, str) and {"dict", "str"} <= fields()[key].kinds:
            _check_mapping(key, value)
    _check_generation(_mapping(values.get("generation_kwargs")))
    _check_schedule(values)
    _check_rule(values["rule"])
    check_losses(values)
    check_rollouts(values)
    check_task(values)
    check_model(values["model_name_or_path"])


def _check_ranges(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        interval = fields()[key].within
        if interval and isinstance(value, (int, float)) and not inside(value, interval):
            raise UserError(f"{key} = {value}: expected {interval_in_words(interval)}.")
        if value is None and key in _NOT_NULL:
            raise UserError(f"{key} = null: expected {interval_in_words(interval)}.")
        if key in _WHOLE_ABOVE_ONE and value and value > 1 and value != int(value):
            raise UserError(f"{key} = {value}: expected a whole number of steps, or a fraction of all steps below 1.")


def _check_single_values(values: Mapping[str, Any]) -> None:
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
    low, high = values.get("vllm_importance_sampling_clip_min"), values.get("vllm_importance_sampling_clip_max", 3.0)
    if low is not None and high is not None and low >= high:
        raise UserError(f"vllm_importance_sampling_clip_min = {low}: expected less than clip_max, {high}.")


def _check_mapping(key: str, text: str) -> None:
    """Check a string given in place of a mapping: JSON, or the path of a JSON file."""
    if key in _FILES and not text.lstrip().startswith("{"):
        if local_path(text).is_file():
            return
        raise UserError(f"{key} = {short(text)}: there is no such file: expected a mapping, or a path to JSON.")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{key} = {short(text)}: expected a mapping, as in {{a: 1}}, or its JSON.")


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return the mapping of a key that is already checked, from YAML or JSON."""
    return dict(json.loads(value) if isinstance(value, str) else value or {})


def _check_generation(given: Mapping[str, Any]) -> None:
    for key, interval in ({key: fields()[key].within for key in _SAMPLING} | _GENERATION).items():
        value = given.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and inside(value, interval)):
            words = interval_in_words(interval)
            raise UserError(f"generation_kwargs: {key} = {short(str(value))}: expected a number, {words}.")


def _check_schedule(values: Mapping[str, Any]) -> None:
    name, given = str(values.get("lr_scheduler_type")), _mapping(values.get("lr_scheduler_kwargs"))
    known, needed = _SCHEDULES.get(name, (tuple(given), ()))
    for key in given:
        if key not in known:
            takes = ", ".join(known) or "nothing"
            raise UserError(f"lr_scheduler_kwargs: {short(key)}: the schedule {name} takes {takes}.")
    if needed and not any(given.get(key) is not None for key in needed):
        raise UserError(f"lr_scheduler_type = {name} needs lr_scheduler_kwargs: {{{' or '.join(needed)}: ...}}.")
    if values.get("max_steps", -1) <= 0 and values.get("num_train_epochs") is None:
        if values.get("max_seconds") is None:
            raise UserError("No limit is set: set max_seconds (training clock), max_steps or both.")
        if name in _DECAYING:
            raise UserError(
                f"lr_scheduler_type = {name} decays over a number of steps, and max_seconds gives none: set max_steps "
                "as well, or lr_scheduler_type: constant."
            )


def _check_rule(rule: str) -> None:
    if rule not in RULES and not IMPORT_PATH.fullmatch(rule):
        raise UserError(
            f"rule = {rule}: expected one of {', '.join(RULES)}, or your own as package.module:function."
            f"{suggest(rule, RULES)}"
        )


def cpu_has_bf16() -> bool | None:
    """Return whether the processor has bf16 instructions; None if the system does not say."""
    info = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not info.is_file():
        return None
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(errors="replace"), re.MULTILINE)
    wanted = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
    return bool(wanted & set(match[1].split())) if match else None
