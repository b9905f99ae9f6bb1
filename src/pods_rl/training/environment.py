"""Quiet libraries, CPU threads, and the record of what a run ran on."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ..distributed import get_rank
from ..planning.batching import counted

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from ..tasks import Fitted, Task
    from .resume import Start

_PACKAGES = ("pods-rl", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify")


def quiet_libraries() -> None:
    """Turn off telemetry, progress bars besides our own, and tokenizer threads, which forked workers cannot use."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import warnings

    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # our own message says what is wrong in a file
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


def _precision(trainer: PODSTrainer) -> str:
    args = trainer.args
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"


def device_line(trainer: PODSTrainer) -> str:
    """Return device, precision and method in a line, for people."""
    import torch

    device = trainer.accelerator.device
    on_cpu = device.type != "cuda"
    name = counted(torch.get_num_threads(), "CPU thread") if on_cpu else torch.cuda.get_device_name(device)
    n, m = trainer.args.num_rollouts, trainer.args.num_generations
    rule = "all trained" if n == m else f"{m} kept by {trainer.args.rule}"
    return f"{name}, {_precision(trainer)}; {counted(n or 0, 'rollout')} a prompt, {rule}"


def describe(trainer: PODSTrainer, task: Task, skipped: Fitted | None, resumed: Start | None) -> dict[str, Any]:
    """Return what `environment.json` holds; ``skipped``: the training prompts that are too long."""
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
        "task": {
            "name": task.name,
            "version": task.version,
            "train": len(task.train),
            "test": len(task.test),
            **({"too_long": asdict(skipped)} if skipped else {}),
        },
        "git_commit": git_commit(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **({"resumed": resumed.describe()} if resumed else {}),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def version(package: str) -> str | None:
    """Return the version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of the working directory; None where it is not a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
