"""A killed run that is resumed ends as if nothing had happened: weights, optimizer, selections, rewards, data order.

Each run is killed for good (SIGKILL) in a process of its own, and resumed by `pods train --resume` in another.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.pretrain import build_tokenizer

from pods_rl.runs import Run

from ..engines.conftest import random_policy
from .commands import RECIPE, Command, differences, outcome, server

STEPS = range(1, 9, 2)
CALLS_OF_AN_EVALUATION = 4  # before the first step: the display shows the reward that is trained
CALLS_A_GENERATION = 16  # two prompts, eight rollouts each
FRESH = ("--config", "r.yaml", "--output")
RESUMED = ("--resume", "--output")
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


def compare(expected: Run, found: Run) -> list[str]:
    return differences(outcome(expected.path), outcome(found.path))


def test_steps_since_the_last_checkpoint_are_made_again(tmp_path):
    """The sample of all. The checkpoint has half of a generation and of a log line; the next generation is killed."""
    prepare(tmp_path, "steps_per_generation 4", save_steps=5, max_steps=9)
    whole = train(tmp_path, *FRESH, "whole")
    assert [row["step"] for row in whole.metrics] == [3, 6, 9]
    assert len({row["grad_norm"] for row in whole.metrics} - {0.0}) > 1
    (tmp_path / "kill-at-call").write_text(str(CALLS_OF_AN_EVALUATION + 2 * CALLS_A_GENERATION + 3))
    killed = train(tmp_path, *FRESH, "killed", code=-signal.SIGKILL)
    assert [row["step"] for row in killed.metrics] == [3, 6]
    assert [path.name for path in killed.checkpoints()] == ["checkpoint-5"]
    (tmp_path / "kill-at-call").unlink()
    assert compare(whole, train(tmp_path, *RESUMED, "killed")) == []
    # A run that was killed after its last step has nothing left to train.
    shutil.copytree(whole.path, tmp_path / "over")
    assert compare(whole, train(tmp_path, *RESUMED, "over")) == []


def test_what_could_not_go_on_exactly_is_refused_and_loses_nothing(tmp_path):
    prepare(tmp_path, "plain", max_steps=2, save_steps=1, eval_prompts=0)
    before = train(tmp_path, *FRESH, "run")
    kept = (before.metrics, before.rollout_files())
    assert len(kept[0]) == len(kept[1]) == 2
    names = ("status.json", "config.yaml", "environment.json", "metrics.jsonl")
    files = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    refused = {  # by the recipe, by the task, by the policy
        "ignore_data_skip": ["--ignore_data_skip", "true"],
        "nowhere": ["--task_rewards", "{nowhere:reward: 1.0}"],
        "nonsense": ["--use_peft", "true", "--lora_target_modules", "[nonsense]"],
    }
    for words, changes in refused.items():
        changes = ["--max_steps", "3", "--allow_changes", "--report_to", "tensorboard", *changes]
        after = train(tmp_path, *RESUMED, "run", *changes, code=2)
        said = " ".join((tmp_path / "log.txt").read_text().split())
        assert words in said
        assert (after.metrics, after.rollout_files()) == kept
        assert {name: (tmp_path / "run" / name).read_bytes() for name in names} == files, words
        assert not (tmp_path / "run" / "tracking").exists()


@pytest.mark.reliability
@pytest.mark.timeout(7200)
def test_every_kill_in_every_configuration(tmp_path):
    wrong = {}
    for number, name in enumerate(CONFIGURATIONS):
        folder, processes = tmp_path / str(number), 2 if name == "2 processes" else 1
        prepare(folder, name)
        whole = train(folder, *FRESH, "whole", processes=processes)
        for step in STEPS:
            train_and_kill(folder, f"killed-{step}", step, processes)
            resumed = train(folder, *RESUMED, f"killed-{step}", processes=processes)
            different = compare(whole, resumed)
            if different:
                wrong[f"{name}, step {step}"] = different
            else:
                shutil.rmtree(resumed.path)
        if processes == 2:  # one process cannot go on for two
            train(folder, *RESUMED, "whole", code=2)
            assert "--num_processes 2" in " ".join((folder / "log.txt").read_text().split())
    assert wrong == {}
