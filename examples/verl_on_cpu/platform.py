"""verl without a GPU, to try things out: a platform `cpu`, and a rollout backend `pods_cpu` (`rollout.py`).

verl has platforms for accelerators only, and rollouts by vLLM, SGLang and TensorRT-LLM. It lets others add both. Every
process that imports verl gets them with these environment variables:

    PYTHONPATH=examples VERL_USE_EXTERNAL_MODULES=verl_on_cpu.platform VERL_PLATFORM=cpu
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

BACKEND = "pods_cpu"  # actor_rollout_ref.rollout.name


class _Device(ModuleType):
    """`torch.cpu` with the functions that verl calls on every accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self) -> str:
        return "CPU"

    def empty_cache(self) -> None: ...

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def max_memory_allocated(self) -> int:
        return 0

    memory_allocated = memory_reserved = max_memory_reserved = max_memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """The CPU as verl's accelerator. In Ray, a "GPU" stands for a training process (`ray_init.num_gpus`)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors there; a number would be a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _replica() -> Any:
    from .rollout import CPUReplica

    return CPUReplica


RolloutReplicaRegistry.register(BACKEND, _replica)
_ROLLOUT_REGISTRY[BACKEND, "async"] = "verl_on_cpu.rollout.CPURollout"
# verl registers its FSDP engine for accelerators by name. It runs on a CPU as it is.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
# verl's default names the CPU and the platform's device. Here they are one, and torch refuses a device named twice.
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)
