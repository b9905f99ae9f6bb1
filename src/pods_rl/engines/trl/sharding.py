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

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from trl import GRPOTrainer

from ...errors import UserError
from .config import PODSConfig


class ShardingMixin(GRPOTrainer):
    """What PODSTrainer changes of TRL's trainer where no process holds the whole policy."""

    args: PODSConfig

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true" or self.is_fsdp_enabled:
            return
        if state.distributed_type != DistributedType.MULTI_CPU:
            return
        # accelerate makes the plugin from the launcher's environment, and drops it on the CPU.
        plugin = FullyShardedDataParallelPlugin()
        if plugin.fsdp_version != 2:
            raise UserError("FSDP 1 does not run on the CPU: set fsdp_version: 2 in the accelerate configuration.")
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
        self.is_fsdp_enabled = True

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self.use_vllm:  # another process generates, or another engine with weights of its own
            return super()._generate(prompts)
        with self.whole_weights():
            return super()._generate(prompts)

    @property
    def weights_are_sharded(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self._dist.is_fsdp or self._dist.is_zero3

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, every process holds the whole policy and may run it as often as it likes; it must not train it.

        Nothing happens where the weights are whole anyway. Every process must enter and leave it.
        """
        if self._dist.fsdp_version == 2:
            with _gathered(self.model_wrapped, self.accelerator.state.fsdp_plugin.reshard_after_forward):
                yield
        else:
            with self._dist.gather_params(list(self.model.parameters())):  # ZeRO-3
                yield


@contextmanager
def _gathered(model: nn.Module, reshard: bool) -> Iterator[None]:
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
        for module in (model, model.get_output_embeddings()):
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)
