"""Whole runs through the real commands, with a random policy small enough to train in a second."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from pods_rl.runs import Run

from . import pods

RECIPE = {
    "num_generations": 2,
    "num_rollouts": 4,
    "per_device_train_batch_size": 2,
    "max_completion_length": 6,
    "max_steps": 3,
    "save_steps": 2,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "eval_prompts": 4,
    "ledger_every": 1,
    "threads": 1,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a policy in ``policy/`` and a recipe for it in ``r.yaml``."""
    from benchmarks.pretrain import build_model, build_tokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    build_model(tokenizer, **sizes).save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    Path("r.yaml").write_text(yaml.safe_dump({"model_name_or_path": "./policy", **RECIPE}))
    return tmp_path


def test_train_resume_and_evaluate(place):
    output = pods("train", "--config", "r.yaml", "--output", "run").output
    run = Run.open("run")
    assert run.evals[0]["accuracy"] == run.evals[0]["format_accuracy"] == 0
    assert "Warning: no completion of the first evaluation" in output
    assert run.state == "finished"
    assert run.config["num_rollouts"] == 4
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert [row["step"] for row in run.evals] == [0, 3]
    assert [path.name for path in run.rollout_files()] == [f"step-00000{step}.parquet" for step in (1, 2, 3)]
    pods("train", "--output", "run", "--resume", "--max_steps", "4")
    run = Run.open("run")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    pods("eval", "--run", "run", "--output", "results")
    (line,) = Path("results/results.jsonl").read_text().splitlines()
    assert json.loads(line)["n-samples"] == {"arithmetic": {"original": 512, "effective": 4}}


@pytest.mark.slow
def test_a_chat_models_files(place):
    """The ledger shows each prompt as the policy continued it; saved configurations generate with a cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("policy")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ end }}"
    tokenizer.save_pretrained("policy")
    Path("rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n')
    words = ["--task", "dataset", "--dataset_name", "rows.jsonl", "--dataset_test_name", "rows.jsonl"]
    words += ["--system_prompt", "Add.", "--chat_template_kwargs", "{end: '[me]'}"]
    words += ["--max_steps", "1", "--save_steps", "1"]
    pods("train", "--config", "r.yaml", "--output", "run", *words)
    run = Run.open("run")
    texts = {"[system]Add.[user]1+1?[me]", "[system]Add.[user]1+2?[me]"}
    assert set(pq.read_table(run.rollout_files()[0])["prompt"].to_pylist()) < texts
    assert set(pq.read_table(run.evaluation_files()[0])["prompt"].to_pylist()) == texts
    assert json.loads(Path("policy/config.json").read_text())["use_cache"]
    for folder in ("checkpoint-1", "final"):
        assert json.loads(Path("run/checkpoints", folder, "config.json").read_text())["use_cache"]
