from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from .utils import print_prompt_completions_sample as print_prompt_completions_sample
from .utils import split_pixel_values_by_grid as split_pixel_values_by_grid
from .utils import unsplit_pixel_values_by_grid as unsplit_pixel_values_by_grid
from .utils import use_adapter as use_adapter

def parse_response(
    tokenizer: Any, ids: list[int], prefix: list[int] | None = ..., tools: list[Any] | None = ...
) -> dict[str, Any]: ...

class VLLMGeneration:
    def __init__(self, **settings: Any) -> None: ...

def disable_gradient_checkpointing(
    model: nn.Module, gradient_checkpointing_kwargs: dict[str, Any] | None = ...
) -> AbstractContextManager[None]: ...
