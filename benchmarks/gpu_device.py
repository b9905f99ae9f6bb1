"""What the cells of `gpu_day.py` share: the device with its memory, and the warnings of a cell."""

from __future__ import annotations

import gc
import logging
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from measuring import peak_memory, reset_peak_memory
from pods_rl.prefix_tree import attention, decoding
from pods_rl.runs.environment import git_commit, processor_name

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
MOST_WARNINGS = 20  # that a cell keeps
LONGEST_WARNING = 300  # characters


@dataclass(frozen=True)
class Device:
    """A device to measure.

    Args:
        kind: `cuda` or `cpu`: how its memory is read, and in which precision it trains.
        place: where its tensors are. It differs from `kind` only in tests, where a CPU stands in for a GPU.
    """

    kind: str
    place: torch.device

    @classmethod
    def of(cls, kind: str) -> Device:
        return cls(kind, torch.device(kind))

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else processor_name()

    def describe(self) -> dict[str, Any]:
        """Return the facts of this machine that every figure depends on."""
        kind, capability = attention.hardware(self.place)
        facts: dict[str, Any] = {
            "device": self.name(),
            "capability": list(capability),
            "python": platform.python_version(),
            "commit": git_commit(),
            "threads": torch.get_num_threads(),
            "varlen_arguments": sorted(attention.varlen_arguments()) if kind == "cuda" else [],
        }
        for package in PACKAGES:
            facts[package] = metadata.version(package)
        if self.is_gpu:
            free, total = torch.cuda.mem_get_info()
            facts["memory_free"] = free
            facts["memory_total"] = total
            facts["cuda"] = torch.version.cuda
        return facts

    def memory(self) -> dict[str, int]:
        """Return the bytes that are held now."""
        if self.is_gpu:
            return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        return {"resident": peak_memory()}

    def peak(self) -> dict[str, int]:
        """Return the most bytes that were held since `reset_peak`: of tensors, and of torch's allocator with them."""
        if self.is_gpu:
            return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return {"resident": peak_memory()}

    def reset_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak_memory()

    def release(self) -> None:
        """Return what earlier cells held to the device."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
        self.reset_peak()


class _Collect(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(f"{record.name}: {record.getMessage()}")


@contextmanager
def noted_warnings(texts: list[str]) -> Iterator[None]:
    """Inside, collect the warnings of Python and of all loggers; at the end keep each once, shortened."""
    decoding._logged_paths.clear()  # why `generate` ran its own loop, else logged once a process
    collect = _Collect(texts)
    # Its loggers pass nothing on to the root by default.
    loggers = [logging.getLogger(), transformers_logging.get_logger("transformers")]
    transformers_logging.set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(collect)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(collect)
        for warning in caught:
            texts.append(f"{warning.category.__name__}: {warning.message}")
        shortened = [" ".join(text.split())[:LONGEST_WARNING] for text in texts]
        texts[:] = list(dict.fromkeys(shortened))[:MOST_WARNINGS]
