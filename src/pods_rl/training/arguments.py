"""The keywords of PODSConfig for a recipe, on this machine."""

from __future__ import annotations

from typing import Any

import torch

from ..loading.policy import uses_bf16
from ..recipe import Recipe


def config_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the keywords of PODSConfig, with those that depend on the machine: use_cpu and bf16."""
    # A run writes its own files; TRL writes only what the recipe sets.
    arguments: dict[str, Any] = {"report_to": "none", "disable_tqdm": True}
    if "save_steps" not in recipe.given and "save_strategy" not in recipe.given:
        arguments["save_strategy"] = "no"
    arguments |= recipe.engine_arguments()
    arguments["push_to_hub"] = False  # the run pushes its final policy itself, after training
    # Every parameter is used in each pass, so DDP need not search the graph for unused ones.
    arguments.setdefault("ddp_find_unused_parameters", False)
    if not torch.cuda.is_available():
        arguments.setdefault("use_cpu", True)
    # With continuous batching TRL would permanently convert float32 weights to bf16.
    converts = arguments.get("use_transformers_continuous_batching") and recipe.values.get("dtype") != "bfloat16"
    if arguments.get("bf16") is None:
        arguments["bf16"] = not converts and uses_bf16(arguments, on_cpu=bool(arguments.get("use_cpu")))
    return arguments
