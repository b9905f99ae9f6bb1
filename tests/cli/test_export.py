"""`pods export`: files that other tools read, and lm-eval's table."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from pods_rl.cli.export import lm_eval_table
from pods_rl.errors import UserError
from pods_rl.runs import Run

from . import pods

RUN = Path(__file__).parents[1] / "stored" / "whole"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_trl_gets_every_rollout_or_those_that_were_kept(tmp_path):
    from datasets import load_dataset

    pods("export", RUN, "--format", "trl", "--output", tmp_path)
    rows = lines(tmp_path / "rollouts.jsonl")
    assert {row["step"] for row in rows} == {1, 2, 4, 6}
    pods("export", RUN, "--format", "trl", "--output", tmp_path / "kept", "--kept")
    kept = lines(tmp_path / "kept" / "rollouts.jsonl")
    assert kept == [row for row in rows if row["selected"]]
    assert 0 < len(kept) < len(rows)
    table = load_dataset("json", data_files=str(tmp_path / "kept/rollouts.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert {"prompt", "completion", "reward", "advantage"} <= set(table["train"].column_names)


def test_trl_gets_its_own_settings_and_history(tmp_path):
    from trl import GRPOConfig

    pods("export", RUN, "--format", "trl", "--output", tmp_path)
    settings = json.loads((tmp_path / "grpo_config.json").read_text())
    assert GRPOConfig(str(tmp_path / "out"), **settings).num_generations == 4
    history = json.loads((tmp_path / "log_history.json").read_text())
    assert [row["step"] for row in history] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert "eval_accuracy" in history[0]
    assert "reward" in history[1]


def test_csv_has_a_row_per_step_and_evaluation(tmp_path):
    run = shutil.copytree(RUN, tmp_path / "run")
    with (run / "evals.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "note": "=1+1"}) + "\n")
    pods("export", run, "--format", "csv")
    with (run / "export" / "metrics.csv").open() as file:
        metrics = list(csv.DictReader(file))
    with (run / "export" / "evals.csv").open() as file:
        evals = list(csv.DictReader(file))
    assert [row["reward"] for row in metrics] == [str(row["reward"]) for row in Run(run).metrics]
    assert [row["step"] for row in evals] == ["0", "6", "7"]
    assert evals[-1]["note"] == "'=1+1"  # no formula


def test_lm_eval_gets_the_last_evaluation(tmp_path):
    pods("export", RUN, "--format", "lm-eval", "--output", tmp_path)
    (path,) = tmp_path.glob("results_*.json")
    result = json.loads(path.read_text())
    assert set(result) >= {"results", "versions", "n-shot", "higher_is_better", "n-samples", "configs", "model_name"}
    assert result["results"]["arithmetic"]["truncated_share,none"] == 0.75
    assert result["results"]["arithmetic"]["alias"] == "arithmetic"
    assert result["n-samples"] == {"arithmetic": {"original": 4, "effective": 4}}
    assert result["higher_is_better"]["arithmetic"] == {
        "accuracy": True, "format_accuracy": True, "both_accuracy": True, "mean_completion_tokens": None,
        "truncated_share": False,
    }  # fmt: skip


def test_the_table_fits_80_columns_and_names_the_task_once():
    metrics = {"accuracy": 0.5, "accuracy_stderr": 0.1, "pass@1": 0.5, "truncated_share": 0.25, "pass@2": float("nan")}
    metrics |= {"mean_completion_tokens": 12.5}
    line = {"results": {"a|b": metrics}, "versions": {"a|b": "1"}, "n-shot": {"a|b": 0}}
    table = lm_eval_table(line | {"higher_is_better": {"a|b": {"accuracy": True, "truncated_share": False}}})
    rows = table.split("\n")
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= 80
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["a/b", "", "", ""]
    assert "↓" in rows[3]
    assert "pass@1" not in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "lmeval"], "expected one of trl, lm-eval, csv. Did you mean lm-eval"),
        (["--format", "csv", "--kept"], "--kept chooses rollouts, which --format csv does not write"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=message):
        pods("export", RUN, *words)


def test_a_run_without_rollouts_or_evaluations(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match="holds no rollouts: a run writes them with ledger_every"):
        pods("export", tmp_path, "--format", "trl")
    with pytest.raises(UserError, match="has no evaluation"):
        pods("export", tmp_path, "--format", "lm-eval")
