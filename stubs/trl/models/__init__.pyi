from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator
from torch import nn

def unwrap_model_for_generation(
    model: nn.Module,
    accelerator: Accelerator,
    gather_deepspeed3_params: bool = ...,
    generation_kwargs: dict[str, Any] | None = ...,
    gradient_checkpointing_kwargs: dict[str, Any] | None = ...,
) -> AbstractContextManager[Any]: ...
