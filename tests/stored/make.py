"""Make the runs in this folder again: ``python make.py`` in a checkout of commit 76d8c73, copied there.

They were written by that commit, before the code was restructured, and later code must still open and resume them
(``tests/test_stored_runs.py``). Do not make them again with later code: the test would then compare it with itself.

    killed      killed (SIGKILL) in step 4 of 6, with a checkpoint of step 3
    whole       the same recipe to its end; only ``final`` of its checkpoints is kept
    experiment  `pods compare` with two arms; of its report the tables are kept, no checkpoint
    policy      the policy that they train: about 7,000 random weights
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from transformers import set_seed

from pods_rl.policies.build import build_model, build_tokenizer

RECIPE = {
    "model_name_or_path": "./policy",
    "task": "arithmetic",
    "task_train_size": 5,
    "task_test_size": 4,
    "task_rewards": {"overlong": 1.0, "tag_count": 0.5},
    "overlong_buffer": 12,
    "rule": "max_variance",
    "num_rollouts": 6,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 12,
    "learning_rate": 1e-2,
    "beta": 0.04,
    "max_steps": 6,
    "save_steps": 3,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "eval_prompts": 4,
    "eval_completions": True,
    "ledger_every": 2,
    "threads": 1,
    "seed": 3,
}


def make_policy(folder: Path) -> None:
    """A policy of random weights. Every digit ends a completion too, so that the lengths differ."""
    tokenizer = build_tokenizer()
    set_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = build_model(tokenizer, num_attention_heads=2, num_key_value_heads=1, **sizes)
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pods(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pods_rl", *words])


def kill_after(checkpoint: Path, run: subprocess.Popen[bytes]) -> None:
    while not (checkpoint / "manifest.json").is_file():
        assert run.poll() is None, "the run ended before it was killed"
        time.sleep(0.001)
    run.kill()
    run.wait()


def main() -> None:
    make_policy(Path("policy"))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert pods("train", "--config", "recipe.yaml", "--output", "whole").wait() == 0
    kill_after(Path("killed/checkpoints/checkpoint-3"), pods("train", "--config", "recipe.yaml", "--output", "killed"))
    changes = {"max_steps": 2, "save_steps": 500, "eval_prompts": 2, "ledger_every": 0, "eval_completions": False}
    base = {key: value for key, value in (RECIPE | changes).items() if key != "seed"}
    arms = {"arms": {"grpo": {"num_rollouts": 4}, "pods": {}}, "base": base, "seeds": 1}
    Path("experiment.yaml").write_text(yaml.safe_dump(arms))
    assert pods("compare", "--config", "experiment.yaml", "--output", "experiment").wait() == 0
    for path in Path("whole/checkpoints").glob("checkpoint-*"):
        shutil.rmtree(path)
    made_with = {"commit": "76d8c73", "torch": torch.__version__, "machine": platform.machine()}
    made_with["cpu"] = torch.backends.cpu.get_cpu_capability()
    Path("made_with.json").write_text(json.dumps(made_with, indent=1) + "\n")
    for path in Path().rglob("environment.json"):  # no path of the machine
        environment = json.loads(path.read_text())
        environment["command"][0] = "pods"
        environment["platform"] = "Linux"
        path.write_text(json.dumps(environment, indent=2) + "\n")
    for path in [*Path().glob("experiment/*/*/checkpoints")]:
        shutil.rmtree(path)
    shutil.rmtree("experiment/report/figures")
    for path in [*Path().rglob(".lock"), *Path("experiment/report").glob("report.*")]:
        path.unlink()


if __name__ == "__main__":
    main()
