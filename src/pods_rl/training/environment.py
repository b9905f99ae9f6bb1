"""What a run runs on: libraries made quiet, threads, and the record of it all."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ..distributed import get_rank
from ..planning.batching import counted

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from ..tasks import Task

_PACKAGES = ("pods-rl", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify")


def quiet_libraries() -> None:
    """No telemetry, no progress bars inside ours, no tokenizer threads under forked workers."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import warnings

    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what is broken in a file is in our own message
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line a retry, before our own message
    if get_rank():  # the first process says it for all
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")


def set_threads(threads: int | None) -> None:
    """Limit torch's CPU threads; None leaves its own choice."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def _precision(trainer: PODSTrainer) -> str:
    args = trainer.args
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"


def device_line(trainer: PODSTrainer) -> str:
    """Device, precision and method in a line, for people."""
    import torch

    device = trainer.accelerator.device
    on_cpu = device.type != "cuda"
    name = counted(torch.get_num_threads(), "CPU thread") if on_cpu else torch.cuda.get_device_name(device)
    n, m = trainer.args.num_rollouts, trainer.args.num_generations
    rule = "all trained" if n == m else f"{m} kept by {trainer.args.rule}"
    return f"{name}, {_precision(trainer)}; {counted(n or 0, 'rollout')} a prompt, {rule}"


def describe(trainer: PODSTrainer, task: Task) -> dict[str, Any]:
    """What `environment.json` holds."""
    import torch

    return {
        "versions": versions(),
        "device": str(trainer.accelerator.device),
        "device_name": device_line(trainer).split(",")[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "processes": trainer.accelerator.num_processes,
        "layout": trainer.layout,
        "precision": _precision(trainer),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "seed": trainer.args.seed,
        "task": {"name": task.name, "version": task.version, "train": len(task.train), "test": len(task.test)},
        "git_commit": git_commit(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def version(package: str) -> str | None:
    """The version of an installed distribution; None where there is none of that name."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the working directory, where it is a checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
