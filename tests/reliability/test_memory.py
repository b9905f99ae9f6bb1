"""A run that is out of memory says where, and what to lower."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from pods_rl.runs import Run

from .. import DEADLINE

LIMITED = """
import resource, sys
from pathlib import Path

limited = []

def limit():
    if limited:
        return
    limited.append(True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), -1))

def scored(text, gold):
    "The update is given little room from here on."
    limit()
    return len(text) % 3

if __name__ == "__main__":
    import torch, transformers, trl, pods_rl.engines.trl.trainer  # what is imported later would count
    from pods_rl.cli import main
    if "generation" in sys.argv:
        sys.argv.remove("generation")
        limit()
    main()
"""
RECIPE = {
    "model_name_or_path": "tiny", "task": "arithmetic", "task_train_size": 8, "task_test_size": 4, "num_rollouts": 64,
    "num_generations": 64, "per_device_train_batch_size": 64, "max_completion_length": 56, "max_steps": 2,
    "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "eval_prompts": 0, "threads": 1,
}  # fmt: skip
CASES = {
    "generation": {"num_rollouts": 40000, "num_generations": 4, "per_device_train_batch_size": 4},
    "update": {
        "num_rollouts": 2048, "num_generations": 2048, "per_device_train_batch_size": 2048,
        "task_rewards": {"limited:scored": 1.0}, "reward_seconds": None,
    },
}  # fmt: skip
NAMES = {
    "generation": ("rollout_batch_size", "num_rollouts"),
    "update": ("per_device_train_batch_size", "gradient_checkpointing: true"),
}


@pytest.mark.reliability
@pytest.mark.parametrize("place", CASES)
def test_running_out_says_where_and_what_to_lower(place, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE | CASES[place]))
    command = [*([place] if place == "generation" else []), "train", "--config", "r.yaml", "--output", "run"]
    done = subprocess.run(
        [sys.executable, "limited.py", *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "2000"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    said = " ".join(done.stderr.split())
    assert re.search(rf"memory .*\b{place} .* 1 \(", said)
    assert "Traceback" not in said
    for words in NAMES[place]:
        assert words in said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed" == Run(tmp_path / "run").state
    assert "memory" in status["reason"]
