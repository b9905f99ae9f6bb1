"""Two processes evaluate as one does: no row twice, none left out, one writer, one clock. Real processes over gloo."""

import json

import pyarrow.parquet as pq
import pytest
import yaml

from pods_rl.evaluation.checkpoint import evaluate_checkpoint
from pods_rl.recipe import build_recipe
from pods_rl.yaml_files import Origin

from .reliability.commands import server


def of_one_process(recipe: dict, seed: int):
    """The shipped policy's evaluation, in this process."""
    made = build_recipe(recipe | {"seed": seed}, Origin("test"))
    return evaluate_checkpoint(made, "tiny", backend="generate")


RECIPE = {
    "model_name_or_path": "tiny", "task": "arithmetic", "num_generations": 2, "num_rollouts": 4, "max_steps": 2,
    "per_device_train_batch_size": 2, "max_completion_length": 40, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "eval_seconds": 0.001, "ledger_every": 0, "threads": 1,
}  # fmt: skip


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(tmp_path):
    recipe = RECIPE | {"eval_prompts": 7, "eval_repeats": 3}  # 21 rows: one process has a row more
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    first, second = server().run_ranks(
        "eval", "--model", "tiny", "--config", "r.yaml", "--seed", 5, "--output", "o", cwd=tmp_path
    )
    assert "accuracy" in first
    assert second == ""
    one, expected = of_one_process(recipe, seed=5)
    (line,) = (tmp_path / "o" / "results.jsonl").read_text().splitlines()
    for name in ("results", "n-samples"):
        assert json.loads(line)[name] == expected[name]
    (table,) = (tmp_path / "o").glob("*.parquet")
    assert pq.read_table(table).to_pydict() == one.columns()
    assert one.scores["accuracy"] > 0  # the policy is able: the equality is of something
