"""Weights that FSDP2 or ZeRO-3 shard over the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

from ...errors import UserError
from .compat import TRLTrainer, unwrap_model_for_generation


def use_fsdp2(trainer: TRLTrainer) -> None:
    """Shard on the CPU too, where accelerate would fall back to DDP without a word; raise UserError for FSDP1."""
    state = trainer.accelerator.state
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None and state.distributed_type == DistributedType.MULTI_CPU:
        # The plugin that accelerate makes from the launcher's environment.
        state.fsdp_plugin = plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    if plugin is not None and plugin.fsdp_version != 2:
        raise UserError(f"FSDP{plugin.fsdp_version} is not supported: set fsdp_version: 2 (FSDP2).")


def layout(trainer: TRLTrainer) -> str:
    """How the processes share the model: `FSDP2`, `ZeRO-3`, `DDP`, or `single` for one process."""
    if trainer._dist.is_fsdp:
        return f"FSDP{trainer._dist.fsdp_version}"
    if trainer.is_deepspeed_enabled:
        return f"ZeRO-{trainer._dist.zero_stage}"
    if trainer.accelerator.num_processes > 1:
        return "DDP"
    return "single"


@contextmanager
def whole_weights(trainer: TRLTrainer) -> Iterator[None]:
    """Give every process the full policy inside, to run but not to train. Call this on every process.

    Nothing happens if the weights are not sharded.
    """
    if trainer._dist.is_fsdp:
        model: Any = trainer.model_wrapped
        reshard = trainer.accelerator.state.fsdp_plugin.reshard_after_forward
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.set_reshard_after_forward(reshard, recurse=False)
                module.reshard()
            # As accelerate shards: the last modules of a forward pass are the first of the backward pass.
            for module in sharded:
                if module in (model, model.get_output_embeddings()):
                    module.set_reshard_after_forward(False, recurse=False)
    elif trainer._dist.is_zero3:
        options: dict[str, Any] = {}
        if "gradient_checkpointing_kwargs" in signature(unwrap_model_for_generation).parameters:  # TRL 1.16
            options["gradient_checkpointing_kwargs"] = trainer.args.gradient_checkpointing_kwargs
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **options):
            yield
    else:
        yield
