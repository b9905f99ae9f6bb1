"""The description of a run: its machine, versions, policy and task."""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from ..distributed.processes import git_commit, versions
from ..engines.trl.batching import counted
from .progress import label_of
from .watcher import Watcher

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from ..tasks import Fitted, Task
    from .resume import Start


def _precision(trainer: PODSTrainer) -> str:
    args = trainer.args
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"


def device_line(trainer: PODSTrainer) -> str:
    """Return device, precision and method as one line to display."""
    import torch

    device = trainer.accelerator.device
    on_cpu = device.type != "cuda"
    name = counted(torch.get_num_threads(), "CPU thread") if on_cpu else torch.cuda.get_device_name(device)
    n, m = trainer.args.num_rollouts, trainer.args.num_generations
    rule = "all trained" if n == m else f"{m} kept by {trainer.args.rule}"
    return f"{name}, {_precision(trainer)}; {counted(n or 0, 'rollout')} a prompt, {rule}"


def describe(trainer: PODSTrainer, task: Task, skipped: Fitted | None, resumed: Start | None) -> dict[str, Any]:
    """Return the content of `environment.json`; ``skipped``: the number of training prompts that are too long."""
    import torch

    from ..engines.trl.generation import describe_vllm

    return {
        "versions": versions(),
        "device": str(trainer.accelerator.device),
        "device_name": device_line(trainer).split(",")[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "processes": trainer.accelerator.num_processes,
        "layout": trainer.layout,
        "precision": _precision(trainer),
        **describe_vllm(trainer),
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


def print_start(
    shown: Watcher, output: Path, trainer: PODSTrainer, task: Task, skipped: Fitted | None, start: Start | None
) -> None:
    """Print what a run trains, where it resumes, and how to watch it."""
    lines = [device_line(trainer), f"{task.name}: {counted(len(task.train), 'prompt')}"]  # each fits 80 columns
    lines += [str(skipped)] if skipped else []
    lines += start.describe() if start else []
    for line in [*lines, f"live in a browser: pods watch {quote(str(output))}"]:
        shown.say(f"{label_of(output)}: {line}")
