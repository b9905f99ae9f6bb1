"""`pods report` as a user runs it; the authors' published runs are its oracle."""

import json
from pathlib import Path

import pytest

from pods_rl.errors import UserError
from pods_rl.report.arms import arms_from_runs
from pods_rl.report.statistics import target_of

from .. import read_csv
from . import pods

PAPER_RUNS = Path(__file__).parents[3] / "shared" / "data" / "paper_runs" / "gsm8k_qwen2.5-3b_l40s.csv"

METRICS = ("answer_accuracy", "format_accuracy", "both_accuracy", "mean_completion_tokens")
PUBLISHED = {  # arm: (speedup, 95 % interval or None where none is published, accuracy at 6 h in percent)
    "grpo": (1.0, None, 80.76),
    "pods-n32-m16": (1.20, (0.80, 1.67), 82.43),
    "pods-n64-m16": (2.00, (1.00, 2.67), 82.60),
    "pods-n128-m16": (1.20, (0.67, 2.00), 82.68),
    "pods-n256-m16": (1.20, (0.67, 1.60), 82.16),
    "pods-n64-m8": (1.50, None, 82.84),
    "pods-n64-m4": (1.00, None, 82.86),
    "pods-n64-m2": (0.67, None, 81.30),
    "max-reward-n64-m16": (0.0, None, 67.28),
    "random-n64-m16": (0.75, (0.44, 1.00), 81.62),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PAPER_RUNS.exists():
        pytest.skip("the authors' published runs are not next to this checkout")
    root = tmp_path_factory.mktemp("published")
    for row in read_csv(PAPER_RUNS):
        run = root / row["arm"] / f"seed-{row['run']}"
        run.mkdir(parents=True, exist_ok=True)
        config = {"seed": int(row["run"]), "num_rollouts": int(row["n"]), "num_generations": int(row["m"])}
        (run / "config.yaml").write_text(json.dumps(config))
        (run / "status.json").write_text('{"state": "finished"}')
        evaluation = {"seconds": 3600 * float(row["hours"]), **{name: row[name] for name in METRICS}}
        with (run / "evals.jsonl").open("a") as file:
            file.write(json.dumps(evaluation) + "\n")
    pods("report", root, "--baseline", "grpo", "--metric", "answer_accuracy")
    return root / "report"


@pytest.mark.parametrize("arm", PUBLISHED)
def test_published_runs_give_the_published_table(published: Path, arm: str) -> None:
    speedup, interval, accuracy = PUBLISHED[arm]
    arms = {found.name: found.curve for found in arms_from_runs([published.parent], "answer_accuracy")}
    base, curve = arms["grpo"], arms[arm]
    # by the authors' rule, from checkpoint to checkpoint
    target = target_of(base)
    reached = base.times[base.mean >= target][0]
    assert reached == 3.0 * 3600
    by_arm = curve.times[curve.mean >= target]
    assert round(reached / by_arm[0], 2) == speedup if len(by_arm) else speedup == 0
    finals = {row["arm"]: row for row in read_csv(published / "final.csv")}
    final = finals[arm]
    # by ours, between checkpoints
    pairs = {row["arm"]: row for row in read_csv(published / "pairs.csv")}
    if speedup:
        baseline_hours = float(finals["grpo"]["hours_to_p99"])
        assert 2.0 < baseline_hours <= 3.0  # hours, not seconds
        if arm != "grpo":
            ratio = baseline_hours / float(final["hours_to_p99"])
            assert ratio == pytest.approx(float(pairs[arm]["speedup"]))
    else:
        assert final["hours_to_p99"] == ""
    if interval:  # a bootstrap over runs, another kind than ours: they overlap
        assert max(float(pairs[arm]["ci_low"]), interval[0]) < min(float(pairs[arm]["ci_high"]), interval[1])
    assert round(100 * float(final["final"]), 2) == accuracy
    assert float(final["final_hours"]) == 6.0
    assert final["final_runs"] == "10"


def test_published_runs_have_every_curve_and_are_compared_with_the_baseline(published: Path) -> None:
    assert {row["metric"] for row in read_csv(published / "curves.csv")} == {*METRICS}
    rows = {row["arm"]: row for row in read_csv(published / "pairs.csv")}
    assert {row["other"] for row in rows.values()} == {"grpo"}
    assert rows.keys() == {*PUBLISHED} - {"grpo"}
    # alone it excludes 0, and among nine pairs with two differences each it may be chance
    assert float(rows["pods-n64-m16"]["over_time_low"]) > 0
    assert rows["pods-n64-m16"]["over_time_settled"] == rows["random-n64-m16"]["settled"] == "false"
    assert rows["max-reward-n64-m16"]["settled"] == "true"
    assert float(rows["max-reward-n64-m16"]["high"]) < 0


def test_the_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(UserError, match="--force"):
        pods("report", "runs/none", "--output", str(tmp_path))
    assert (tmp_path / "report.md").read_text() == "mine"
