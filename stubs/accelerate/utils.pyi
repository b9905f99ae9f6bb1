from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

class DistributedType(str, Enum):
    MULTI_CPU: str
    FSDP: str

class DynamoBackend(str, Enum):
    @classmethod
    def list(cls) -> list[str]: ...

class TorchDynamoPlugin:
    def __init__(self, **settings: Any) -> None: ...

class FullyShardedDataParallelPlugin:
    fsdp_version: int
    reshard_after_forward: bool
    def __init__(self, **settings: Any) -> None: ...
    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = ..., override: bool = ...) -> None: ...

def broadcast(tensor: Tensor, from_process: int = ...) -> Tensor: ...
def broadcast_object_list(object_list: list[_T], from_process: int = ...) -> list[_T]: ...
def gather_object(object: list[_T]) -> list[_T]: ...
def send_to_device(
    tensor: _T, device: torch.device, non_blocking: bool = ..., skip_keys: list[str] | str | None = ...
) -> _T: ...
