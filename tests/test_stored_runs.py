"""Runs that an earlier version wrote (``tests/stored/make.py``) still open, report and resume to the same bits."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pods_rl.report import build_report
from pods_rl.runs import Run, find_runs
from pods_rl.runs.checkpoints import last_good

from .reliability.resume_runs import differences, train

STORED = Path(__file__).parent / "stored"


def rounding() -> str:
    """A hash of what torch computes here: its version, its libraries and the CPU decide the last bits."""
    torch.manual_seed(0)
    x, weight = torch.randn(37, 64), torch.randn(96, 64)
    heads = torch.randn(2, 4, 19, 16)
    results = [
        functional.linear(x, weight), functional.linear(x[:1], weight), functional.silu(x), x.softmax(1),
        x.log_softmax(1), x.exp(), (x * x).mean(1).rsqrt(), x.cos(), x.T @ x,
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
    ]  # fmt: skip
    return hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy of the runs, which a test may change."""
    return shutil.copytree(STORED, tmp_path / "stored")


def without_later_metrics(run: Run, known: set[str]) -> Run:
    """Drop the metrics that the version which wrote `known` did not have yet."""
    rows = [{name: value for name, value in row.items() if name in known} for row in run.metrics]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run(run.path)


def test_a_stored_run_opens():
    run, killed = Run.open(STORED / "whole"), Run.open(STORED / "killed")
    assert (run.state, run.step, run.seed, len(run.metrics), len(run.evals)) == ("finished", 6, 3, 6, 2)
    assert (run.config["rule"], run.config["num_rollouts"], run.environment["processes"]) == ("max_variance", 6, 1)
    assert [path.name for path in run.rollout_files()] == [f"step-{step:06d}.parquet" for step in (1, 2, 4, 6)]
    assert [path.name for path in run.evaluation_files()] == ["step-000000.parquet", "step-000006.parquet"]
    assert run.final_checkpoint == STORED / "whole/checkpoints/final"
    assert (killed.state, [path.name for path in killed.checkpoints()]) == ("running", ["checkpoint-3"])
    assert last_good(STORED / "killed/checkpoints") == (killed.checkpoints()[0], [])


@pytest.mark.slow
def test_a_stored_run_resumes_to_the_weights_and_metrics_of_the_one_that_was_not_killed(stored):
    whole = Run(stored / "whole")
    resumed = train(stored, "--resume", "--output", "killed")
    assert resumed.environment["resumed"]
    assert [path.name for path in resumed.checkpoints()] == ["checkpoint-3", "checkpoint-6"]  # `whole` keeps neither
    resumed = without_later_metrics(resumed, {name for row in whole.metrics for name in row})
    different = [part for part in differences(whole, resumed) if part != "checkpoints"]
    if rounding() == json.loads((STORED / "made_with.json").read_text())["rounding"]:
        assert different == []
    else:
        assert [sorted(row) for row in resumed.metrics] == [sorted(row) for row in whole.metrics]
        assert resumed.status["reason"] == whole.status["reason"]


@pytest.mark.slow
def test_a_stored_experiment_gives_the_same_tables(stored):
    tables = {path.name: path.read_text() for path in (stored / "experiment/report").iterdir()}
    assert {name: [run.state for run in runs] for name, runs in find_runs(stored / "experiment").items()} == {
        "grpo": ["finished"], "pods": ["finished"],
    }  # fmt: skip
    build_report([stored / "experiment"], stored / "again", baseline="grpo", metric="accuracy")
    assert {path.name: path.read_text() for path in (stored / "again").glob("*.csv")} == tables
