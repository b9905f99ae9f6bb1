"""Runs that are killed and resumed: their recipes, and how they start and are killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tools.pretrain import build_tokenizer

from pods_rl.runs import Run

from ..engines.conftest import random_policy
from .commands import RECIPE, Command, server

# Five prompts, two a generation: epochs end within a run, and one prompt of each is left over.
BASE = RECIPE | {
    "model_name_or_path": "./policy",
    "task_train_size": 5,
    "task_rewards": {"letters:letters": 1.0},
    "reward_seconds": None,  # in the training process, which it kills
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 12,
    "max_steps": 9,
    "save_total_limit": None,
    "eval_prompts": 4,
    "ledger_every": 1,
    "seed": 3,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr_scheduler_type": "cosine"},
    "num_iterations 2": {"num_iterations": 2, "num_rollouts": 8, "beta": 0.04, "logging_steps": 2},
    "steps_per_generation 4": {
        "steps_per_generation": 4, "per_device_train_batch_size": 2, "num_rollouts": 8, "rule": "random",
        "task_train_size": 3, "logging_steps": 3,
    },
    "LoRA": {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1, "num_rollouts": 8},
    "2 processes": {"num_rollouts": 8, "per_device_train_batch_size": 4, "num_iterations": 2},
    "n not a multiple of m": {
        "num_rollouts": 7, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "advantages": "before",
        "beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2,
    },
}  # fmt: skip
# A reward with many values, a function of the text alone. It kills its process at the call that a file names.
REWARD = """
import itertools, os, pathlib, signal

calls = itertools.count(1)

def letters(text, gold):
    deadly = pathlib.Path("kill-at-call")
    if deadly.exists() and next(calls) == int(deadly.read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    return (sum(map(ord, text)) % 17) / 16
"""


def prepare(folder: Path, configuration: str, **settings: Any) -> None:
    """A random policy, a reward of the user's own and a recipe, in a folder."""
    tokenizer = build_tokenizer()
    random_policy(tokenizer).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    (folder / "letters.py").write_text(REWARD)
    (folder / "r.yaml").write_text(yaml.safe_dump(BASE | CONFIGURATIONS[configuration] | settings))


def start(folder: Path, words: list[str], processes: int) -> list[Command]:
    """Start `pods train`, in one process or in two."""
    if processes == 1:
        return [server().start(*words, cwd=folder, log="log.txt")]
    return server().start_ranks(*words, cwd=folder)


def train(folder: Path, *words: str, processes: int = 1, code: int = 0) -> Run:
    """A run to its end, which must come with this exit code."""
    for command in start(folder, ["train", *words], processes):
        ended = command.wait()
        assert ended == code, f"exit code {ended}:\n{command.log.read_text(errors='replace')[-3000:]}"
    return Run(folder / words[words.index("--output") + 1])


def train_and_kill(folder: Path, output: str, step: int, processes: int) -> Run:
    """A run that is killed as soon as its checkpoint of a step is whole: in the step after it."""
    commands = start(folder, ["train", "--config", "r.yaml", "--output", output], processes)
    checkpoint = folder / output / "checkpoints" / f"checkpoint-{step}"
    try:
        assert commands[0].until(lambda: is_whole(checkpoint, processes)), commands[0].log.read_text(errors="replace")
    finally:
        for command in commands:
            command.kill()
        for command in commands:
            command.wait()
    return Run(folder / output)


def is_whole(checkpoint: Path, processes: int) -> bool:
    """Whether the files that are written last are there."""
    try:
        for name in ("trainer_state.json", *(f"pods_state_{i}.json" for i in range(processes))):
            json.loads((checkpoint / name).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return True
