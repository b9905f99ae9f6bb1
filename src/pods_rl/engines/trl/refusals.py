"""Refuse arguments that PODSTrainer does not support, and warn about continuous batching."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import ProcessorMixin

from ...errors import UserError
from .compat import TRLTrainer
from .config import PODSConfig

_IMAGES = {"image", "images"}


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructor that down-sampling does not support.

    Raises:
        TypeError: `args` is not a PODSConfig.
        UserError: tools, an environment, a rollout function, or images; DeepSpeed without a GPU.
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
    for name, what in (
        ("tools", "tools"),
        ("environment_factory", "environments"),
        ("rollout_func", "a custom rollout function"),
    ):
        if arguments.get(name):
            raise UserError(
                f"PODSTrainer does not support {what} yet ({name} was given): "
                "train with TRL's GRPOTrainer, or drop the argument"
            )
    if isinstance(arguments.get("processing_class"), ProcessorMixin):
        raise _no_images("a multimodal processing_class")
    for name in ("train_dataset", "eval_dataset"):
        given = arguments.get(name)
        for part in given.values() if isinstance(given, dict) else (given,):
            columns = set(getattr(part, "column_names", None) or ())  # a stream may not have them
            if images := sorted(columns & _IMAGES):
                raise _no_images(f"column {images[0]!r} in {name}")


def refuse_images(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a batch with images: in a column that a stream did not name, or in a part of a chat message.

    Raises:
        UserError: there is an image; the message says where.

    >>> refuse_images([{"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2="}]}]}])
    """
    for row in rows:
        if images := sorted(_IMAGES & row.keys()):
            raise _no_images(f"column {images[0]!r} in the data set")
        messages = row.get("prompt")
        for message in messages if isinstance(messages, list) else ():
            parts = message.get("content") if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping) and part.get("type") == "image":
                    raise _no_images(f"a message of role {message.get('role')!r} with a part of type 'image'")


def _no_images(seen: str) -> UserError:
    return UserError(f"PODSTrainer does not support images yet ({seen}): remove them, or train with GRPOTrainer")


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
