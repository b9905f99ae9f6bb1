"""The operations that torch runs, by name and device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Inside, `seen` collects the name of each operation with the type of the device of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self.seen.append((function.overloadpacket.__name__, args[0].device.type))
        return function(*args, **(kwargs or {}))
