"""A policy small enough to train in a second, and a recipe for it."""

from pathlib import Path

import pytest
import yaml

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
    from tools.pretrain import build_model, build_tokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    build_model(tokenizer, **sizes).save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    Path("r.yaml").write_text(yaml.safe_dump({"model_name_or_path": "./policy", **RECIPE}))
    return tmp_path
