"""A pipe where a file should be is refused: opening it would block forever."""

import os
import re
import shutil

import pytest

from pods_rl.errors import UserError
from pods_rl.policies import policy_path

from .cli import pods


@pytest.fixture
def place(tmp_path):
    shutil.copytree(policy_path("tiny"), tmp_path / "policy")
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
