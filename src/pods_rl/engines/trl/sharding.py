"""Policies whose weights are shared out among the processes: FSDP2 and ZeRO-3.

What is overridden of TRL and transformers:

- `create_accelerator_and_postprocess`: FSDP2 on the CPU too, where accelerate would fall back to DDP without a word.
- `_generate`: generate with whole weights, so that no process waits for another's tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from ...errors import UserError
from .config import PODSConfig


class ShardingMixin(GRPOTrainer):
    """What PODSTrainer changes of TRL's trainer where no process holds the whole policy."""

    args: PODSConfig

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
            return
        plugin = getattr(state, "fsdp_plugin", None)
        if plugin is None and state.distributed_type == DistributedType.MULTI_CPU:
            plugin = self._shard_on_cpu()
        if plugin is not None and plugin.fsdp_version != 2:
            raise UserError(f"FSDP{plugin.fsdp_version} is not supported: set fsdp_version: 2 (FSDP2).")

    def _shard_on_cpu(self) -> FullyShardedDataParallelPlugin:
        """Give accelerate back the plugin that it makes from the launcher's environment, and drops on the CPU."""
        if torch.cuda.is_available():
            raise UserError(
                "use_cpu = true, but FSDP2 shards on the GPUs of this machine: leave use_cpu out, or hide the GPUs "
                "(CUDA_VISIBLE_DEVICES= pods train ...)."
            )
        state = self.accelerator.state
        plugin = FullyShardedDataParallelPlugin(**(self.args.fsdp_plugin_args or {}))
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
        self.is_fsdp_enabled = True
        return plugin

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        # vLLM has weights of its own, and TRL gathers those of ZeRO-3 (`ds3_gather_for_generation`).
        if self.use_vllm or not self._dist.is_fsdp:
            return super()._generate(prompts)
        with self.whole_weights():
            return super()._generate(prompts)

    @property
    def layout(self) -> str:
        """What the processes do with the model: `FSDP2`, `ZeRO-3`, `DDP`, or `single` for one process."""
        if self._dist.is_fsdp:
            return f"FSDP{self._dist.fsdp_version}"
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self._dist.zero_stage}"
        return "DDP" if self.accelerator.num_processes > 1 else "single"

    @property
    def weights_are_sharded(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self._dist.is_fsdp or self._dist.is_zero3

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, every process holds the whole policy and may run it as often as it likes; it must not train it.

        Nothing happens where the weights are whole anyway. Every process must enter and leave it.
        """
        if self._dist.is_fsdp:
            with _gathered(self.model_wrapped, self.accelerator.state.fsdp_plugin.reshard_after_forward):
                yield
        elif self._dist.is_zero3:
            checkpointing = self.args.gradient_checkpointing_kwargs
            with unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=checkpointing
            ):
                yield
        else:
            yield


@contextmanager
def _gathered(model: PreTrainedModel, reshard: bool) -> Iterator[None]:
    """All parameters of an FSDP2 model in place; what each module did after a forward pass is put back."""
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
