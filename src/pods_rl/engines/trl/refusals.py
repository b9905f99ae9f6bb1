"""Refuse arguments that PODSTrainer does not support, and warn about continuous batching."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from ...errors import UserError
from .compat import TRLTrainer
from .config import PODSConfig


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructor that down-sampling does not support.

    Raises:
        TypeError: `args` is not a PODSConfig.
        UserError: DeepSpeed without a GPU; tools or environments with ZeRO-3, unless vLLM generates.
    """
    config = arguments["args"]
    if not isinstance(config, PODSConfig):
        raise TypeError(
            f"PODSTrainer needs args of type PODSConfig, got {type(config).__name__}: "
            "PODSConfig takes the same fields, plus num_rollouts"
        )
    if config.use_cpu and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError(
            "The accelerate configuration asks for DeepSpeed, and this runs on the CPU, where accelerate silently uses "
            "DDP: choose --accelerate_config fsdp2 or ddp."
        )
    turns = [name for name in ("tools", "environment_factory") if arguments.get(name)]
    if turns and not config.use_vllm and is_deepspeed_zero3_enabled():
        raise UserError(
            f"{turns[0]} cannot be used with DeepSpeed's ZeRO-3 without vLLM: every turn gathers the weights on all "
            "processes, and some have more turns than others, so the run would hang. Use use_vllm, ZeRO-2 or FSDP2."
        )


def lossy_cast(trainer: TRLTrainer) -> str | None:
    """Return a warning if continuous batching makes TRL round the policy's weights, else None."""
    args = trainer.args
    if not (trainer.use_transformers_continuous_batching and (args.bf16 or args.fp16)):
        return None
    if torch.float32 not in {p.dtype for p in trainer.model.parameters() if p.requires_grad}:
        return None
    flag, to = ("bf16", "bfloat16") if args.bf16 else ("fp16", "float16")
    return (
        f"use_transformers_continuous_batching with {flag} = true: before each generation TRL turns the trained "
        f"float32 weights into {to}, permanently, and small updates are then rounded away. Set {flag}: false, or load "
        f"the policy in {to} on purpose (dtype: {to})."
    )
