"""A real pretrained chat model, its tokenizer and its template, through the real commands: `make test-real-model`.

The model is SmolLM2-135M-Instruct (`benchmarks/chat.py`). GSM8K is too hard for it, so those steps are rewarded for a
letter; the largest of four numbers is a task that it sometimes gets right.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from ..benchmarks import module

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
SHORT = {
    "system_prompt": "", "num_rollouts": 8, "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 2,
    "max_completion_length": 12, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "loss_type": "grpo",
    "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "threads": 1, "ledger_every": 1, "eval_prompts": 4,
}  # fmt: skip
FINAL = Path("checkpoints", "final")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the policy, the questions, and the recipe of two short steps in `largest.yaml`."""
    folder = tmp_path_factory.mktemp("chat")
    module("chat").prepare(folder)
    (folder / "letters.py").write_text("def letters(text, gold):\n    return text.count('e')\n")
    largest = {"task": "dataset", "dataset_name": "train.jsonl", "dataset_test_name": "test.jsonl"}
    recipe = {"model_name_or_path": "./policy", **largest, "task_rewards": {"accuracy": 1.0}, **SHORT}
    (folder / "largest.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def run(place):
    """The run of `largest.yaml`."""
    pods(place, "train", "--config", "largest.yaml", "--output", "run")
    return place / "run"


def pods(place, *words):
    """Run a command as a person does; return what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(place)])}
    done = subprocess.run(
        [sys.executable, "-m", "pods_rl", *words],
        cwd=place,
        env=environment,
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_ledger_has_the_text_that_the_policy_continued(run):
    rows = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()
    assert len(rows) == 8
    assert sum(row["selected"] for row in rows) == 4
    assert all(row["prompt"].startswith("<|im_start|>") for row in rows)
    assert all(row["prompt"].endswith("<|im_start|>assistant\n") for row in rows)
    assert not any("<|im_" in row["completion"] for row in rows)
    graded = pq.read_table(run / "evaluations" / "step-000000.parquet").to_pylist()
    assert all(row["prompt"].endswith("<|im_start|>assistant\n") for row in graded)


def test_the_final_policy_is_the_models_but_for_its_weights(place, run):
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (place / "policy", run / "checkpoints" / "final")
    )
    assert after.pop("dtype") == "float32"  # in which it was trained
    assert before.pop("dtype") == "bfloat16"
    assert after == before
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (run / FINAL / name).read_text() == (place / "policy" / name).read_text()


def test_evaluation_report_and_plan(place, run):
    assert "accuracy" in pods(place, "eval", "--run", "run", "--eval_prompts", "4", "--output", "evaluated")
    pods(place, "report", "run", "--output", "report")
    assert "im_start" in (place / "report" / "report.html").read_text()
    assert "To settle it" in pods(place, "plan", "--config", "largest.yaml", "--seconds", "60")


@pytest.mark.parametrize("adapter", [{}, {"use_peft": True, "lora_r": 8, "learning_rate": 1e-4}], ids=["whole", "LoRA"])
def test_two_steps_of_gsm8k(place, adapter):
    if not GSM8K.is_dir():
        pytest.skip(f"GSM8K is not in {GSM8K}")
    rewards = {"accuracy": 1.0, "letters:letters": 0.1}
    recipe = {"model_name_or_path": "./policy", "task": "gsm8k", "data_dir": str(GSM8K.parent), "task_rewards": rewards}
    name = "lora" if adapter else "gsm8k"
    (place / f"{name}.yaml").write_text(yaml.safe_dump({**recipe, **SHORT, **adapter}))
    pods(place, "train", "--config", f"{name}.yaml", "--output", name)
    metrics = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    assert [row["step"] for row in metrics if row["grad_norm"] > 0] == [1, 2]
    assert (place / name / FINAL / ("adapter_model.safetensors" if adapter else "model.safetensors")).is_file()
