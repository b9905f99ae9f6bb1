from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from . import utils as utils
from .utils import DistributedType, FullyShardedDataParallelPlugin

class PartialState:
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    def __init__(self, cpu: bool = ..., **kwargs: Any) -> None: ...

class AcceleratorState:
    distributed_type: DistributedType
    mixed_precision: str
    fsdp_plugin: FullyShardedDataParallelPlugin | None

class Accelerator:
    def __init__(self, **settings: Any) -> None: ...
    state: AcceleratorState
    scaler: Any  # of fp16
    sync_gradients: bool
    @property
    def device(self) -> torch.device: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def is_main_process(self) -> bool: ...
    @property
    def mixed_precision(self) -> str: ...
    def gather(self, tensor: Tensor) -> Tensor: ...
    def reduce(self, tensor: Tensor, reduction: str = ..., scale: float = ...) -> Tensor: ...
    # Any: of a model that DDP, FSDP or DeepSpeed wraps, the model itself.
    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = ..., keep_torch_compile: bool = ...) -> Any: ...
    def get_state_dict(self, model: nn.Module, unwrap: bool = ...) -> dict[str, Tensor]: ...
    def autocast(self, autocast_handler: Any = ...) -> AbstractContextManager[None]: ...
    def wait_for_everyone(self) -> None: ...
