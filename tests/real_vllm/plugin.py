"""A plugin of vLLM (entry point `vllm.general_plugins`), so that a trainer can write into its weights on a CPU."""

from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils


def register() -> None:
    """Keep the layers' own weights, which vLLM's CPU kernels repack once and delete; compile nothing (a minute)."""
    configure = EngineArgs.create_engine_config

    def eager(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        self.enforce_eager = True
        return configure(self, *args, **kwargs)

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    EngineArgs.create_engine_config = eager
    utils.dispatch_cpu_unquantized_gemm = plain
