"""Runs that are killed and resumed: their recipes, and how they start and are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from pods_rl.runs import Run
from tests import DEADLINE

from .commands import server

# Five prompts, two a generation: epochs end within a run, and one prompt of each is left over.
BASE = {
    "model_name_or_path": "./policy",
    "task_train_size": 5,
    "task_rewards": {"letters:letters": 1.0},
    "reward_seconds": None,  # in the training process, which it kills
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "max_steps": 9,
    "save_steps": 1,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "eval_prompts": 4,
    "ledger_every": 1,
    "threads": 1,
    "seed": 3,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr_scheduler_type": "cosine"},
    "num_iterations 2": {"num_iterations": 2, "num_rollouts": 8, "beta": 0.04, "logging_steps": 2},
    "steps_per_generation 4": {
        "steps_per_generation": 4, "per_device_train_batch_size": 2, "num_rollouts": 8, "rule": "random",
        "task_train_size": 3, "logging_steps": 3, "log_completions": True,
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
    from tools.pretrain import build_model, build_tokenizer
    from transformers import set_seed

    tokenizer = build_tokenizer()
    set_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = build_model(tokenizer, **sizes)
    # Every digit ends a completion too, so that random weights write rows of many lengths.
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    (folder / "letters.py").write_text(REWARD)
    (folder / "r.yaml").write_text(yaml.safe_dump(BASE | CONFIGURATIONS[configuration] | settings))


class Started:
    """A `pods train` that is running; several processes are started through accelerate, one is forked."""

    def __init__(self, folder: Path, words: list[str], processes: int = 1) -> None:
        self.log = folder / "log.txt"
        self.forked = server().start(*words, cwd=folder, log="log.txt") if processes == 1 else None
        if self.forked:
            return
        with self.log.open("ab") as log:
            self.launched = subprocess.Popen(
                [sys.executable, "-m", "pods_rl", *words, "--num_processes", str(processes)],
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        """SIGKILL to every process of the run at once."""
        if self.forked:
            self.forked.kill()
            self.wait()
            return
        with suppress(psutil.NoSuchProcess):  # it has ended
            parent = psutil.Process(self.launched.pid)
            everyone = [*parent.children(recursive=True), parent]
            for process in everyone:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everyone, timeout=DEADLINE)
        self.wait()

    def wait(self) -> int | None:
        """The exit code."""
        return self.forked.wait() if self.forked else self.launched.wait(DEADLINE)

    def running(self) -> bool:
        return not self.forked.ended() if self.forked else self.launched.poll() is None


def train(folder: Path, *words: str, processes: int = 1, code: int = 0) -> Run:
    """A run to its end, which must come with this exit code."""
    started = Started(folder, ["train", *words], processes)
    ended = started.wait()
    assert ended == code, f"exit code {ended}:\n{started.log.read_text(errors='replace')[-3000:]}"
    return Run(folder / words[words.index("--output") + 1])


def train_and_kill(folder: Path, output: str, step: int, processes: int = 1) -> Run:
    """A run that is killed as soon as its checkpoint of a step is whole: in the step after it."""
    started = Started(folder, ["train", "--config", "r.yaml", "--output", output], processes)
    checkpoint = folder / output / "checkpoints" / f"checkpoint-{step}"
    try:
        end = time.monotonic() + DEADLINE
        while not is_whole(checkpoint, processes):
            # it may end between the two looks
            assert started.running() or is_whole(checkpoint, processes), started.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, f"no {checkpoint.name} in {DEADLINE:g} s"
            time.sleep(0.002)
    finally:
        started.kill()
    return Run(folder / output)


def is_whole(checkpoint: Path, processes: int) -> bool:
    """Whether the files that are written last are there."""
    try:
        for name in ("trainer_state.json", *(f"pods_state_{i}.json" for i in range(processes))):
            json.loads((checkpoint / name).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return True
