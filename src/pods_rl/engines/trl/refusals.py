"""What PODSTrainer does not support yet, each refused in one sentence when the trainer is built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import ProcessorMixin

from ...errors import UserError
from .config import PODSConfig


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructor whose rows the expansion to n rollouts does not see.

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
            "The accelerate configuration asks for DeepSpeed, and this runs on the CPU, where accelerate would use DDP "
            "without a word: choose --accelerate_config fsdp2 or ddp."
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
    columns = set(getattr(arguments.get("train_dataset"), "column_names", None) or ())
    images = sorted(columns & {"image", "images"})
    if images or isinstance(arguments.get("processing_class"), ProcessorMixin):
        seen = f"column {images[0]!r} in train_dataset" if images else "a multimodal processing_class"
        raise UserError(f"PODSTrainer does not support images yet ({seen}): drop the column, or train with GRPOTrainer")
