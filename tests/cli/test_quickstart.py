"""The quickstart as a person runs it, only shorter: the real command, a shipped policy, two processes at a time."""

import csv
import subprocess
import sys

import pytest

from pods_rl.runs import find_runs

from .. import DEADLINE

pytestmark = pytest.mark.slow

SHORT = {"seeds": "1", "max_seconds": "2", "eval_seconds": "1", "eval_prompts": "32", "ledger_every": "2"}


def test_quickstart_trains_its_arms_and_reports(tmp_path):
    output = tmp_path / "quickstart"
    command = [sys.executable, "-m", "pods_rl", "compare", "--config", "quickstart", "--output", str(output)]
    command += ["--parallel", "2", *(word for key, value in SHORT.items() for word in (f"--{key}", value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "report" / "report.html").stat().st_size > 0
    assert "report.html" in done.stdout.replace("\n", "")
    arms = find_runs(output)
    assert list(arms) == ["grpo-trl", "pods", "grpo"]
    (trl,), (pods,), (grpo,) = arms.values()
    assert {run.state for run in (trl, pods, grpo)} == {"finished"}
    assert len({run.evals[0]["accuracy"] for run in (trl, pods, grpo)}) == 1
    assert pods.evals[0]["accuracy"] < 0.5  # of 32 prompts; of all it is 0.25
    for run, n in ((trl, 4), (pods, 16), (grpo, 4)):
        dues = [row["due"] for row in run.evals]
        assert dues[0] == 0.0
        assert dues[-1] >= 2.0
        assert dues == sorted(set(dues))
        assert all(due % 1.0 == 0.0 for due in dues)  # a slow step may pass over one
        assert all(row["seconds"] >= row["due"] for row in run.evals)
        assert run.metrics[0]["pods/tokens/generated"] > 5 * n
    with (output / "report" / "final.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["arm"] for row in rows} >= {"pods"}
