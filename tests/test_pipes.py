"""A pipe where a file should be is refused or skipped: opening it would block forever."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pods_rl.errors import UserError
from pods_rl.policies import policy_path
from pods_rl.runs import Run, RunWriter, files

from .cli import pods


@pytest.fixture
def place(tmp_path):
    (tmp_path / "policy").mkdir()
    for file in Path(policy_path("tiny")).iterdir():
        if file.is_file():
            (tmp_path / "policy" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "data").mkdir()
    return tmp_path


DRY = ("train", "tiny-pods", "--dry_run", "--eval_prompts", "0")
DATA = (*DRY, "--task", "dataset")
COMMANDS = {
    "data.jsonl": (*DATA, "--dataset_name", "data.jsonl"),
    "data/train.parquet": (*DATA, "--dataset_name", "data"),
    "policy/config.json": (*DRY, "--model_name_or_path", "./policy"),
    "accelerator.json": (*DRY, "--accelerator_config", "accelerator.json"),
    "r.yaml": ("train", "--config", "r.yaml", "--dry_run"),
    "rows.parquet": ("select", "rows.parquet", "--keep", "2"),
}


@pytest.mark.slow
@pytest.mark.timeout(240)  # then the command hangs
@pytest.mark.parametrize("pipe", COMMANDS)
def test_a_command_names_the_pipe_and_ends(place, monkeypatch, pipe):
    monkeypatch.chdir(place)
    target = place / pipe
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    with pytest.raises(UserError, match=re.escape(target.name)):
        pods(*COMMANDS[pipe])


def test_a_pipe_among_the_files_of_a_run_is_not_opened(tmp_path):
    for name in (files.METRICS, files.EVALS, files.STATUS, files.ENVIRONMENT, "rollouts/step-000001.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / files.CONFIG).write_text("seed: 1\n")
    run = Run.open(tmp_path)
    assert (run.metrics, run.evals, run.status, run.environment) == ([], [], {}, {})
    with RunWriter(tmp_path, resume=True) as writer:
        with pytest.raises(OSError, match=r"regular|device") as refused:
            writer.append_metrics({"step": 1})
        assert refused.value.filename == str(tmp_path / files.METRICS)
        writer.rewind(0, 0)
        writer.append_metrics({"step": 1})
        writer.write_status("running")
    assert Run.open(tmp_path).state == "running"
