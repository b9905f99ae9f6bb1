"""A pipe where a file should be is refused or skipped: opening it would block forever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pods_rl.policies import policy_path

SECONDS = 240  # then the command hangs; the limit is no expectation


@pytest.fixture
def place(tmp_path):
    (tmp_path / "policy").mkdir()
    for file in Path(policy_path("tiny")).iterdir():
        if file.is_file():
            (tmp_path / "policy" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "data").mkdir()
    return tmp_path


def pods(place, *words):
    command = [sys.executable, "-m", "pods_rl", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)


DRY = ("train", "tiny-pods", "--dry_run")
COMMANDS = {
    "data.parquet": (*DRY, "--dataset_name", "data.parquet"),
    "data.jsonl": (*DRY, "--dataset_name", "data.jsonl"),
    "data/train.parquet": (*DRY, "--dataset_name", "data"),
    "data/train.jsonl.gz": (*DRY, "--dataset_name", "data"),
    "policy/config.json": (*DRY, "--model_name_or_path", "./policy"),
    "policy/model.safetensors": (*DRY, "--model_name_or_path", "./policy"),
    "accelerator.json": (*DRY, "--accelerator_config", "accelerator.json"),
    "r.yaml": ("train", "--config", "r.yaml", "--dry_run"),
    "rows.parquet": ("select", "rows.parquet", "--num_generations", "2"),
    "evaluations.csv": ("report", "--csv", "evaluations.csv"),
    "run/metrics.jsonl": ("train", "tiny-pods", "--output", "run", "--max_steps", "1", "--eval_prompts", "0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("pipe", COMMANDS)
def test_a_command_names_the_pipe_and_ends(place, pipe):
    target = place / pipe
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    done = pods(place, *COMMANDS[pipe])
    assert done.returncode in (1, 2), done.stderr
    assert target.name in done.stderr
    assert "Traceback" not in done.stderr
