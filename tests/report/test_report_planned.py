"""Runs that failed, never started, or were made again: each is said."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from conftest import unrendered, write_run

from pods_rl.report import ReportFiles, build_report
from pods_rl.report.arms import Missing, arms_from_runs

PLAN = "baseline: grpo\narms:\n  grpo: {num_rollouts: 16}\n  pods: {num_rollouts: 64}\n  later: {}\nseeds: [1, 2, 3]\n"


def write_plan(root: Path, plan: str = PLAN) -> Path:
    """Of nine planned runs six are not there; one of those left a directory behind."""
    for arm, seed in (("grpo", 1), ("grpo", 2), ("pods", 1)):
        failed = arm == "grpo" and seed == 2
        state = {"state": "failed", "end": 60, "reason": "out of memory"} if failed else {}
        write_run(root / arm / f"seed-{seed}", arm, seed, **state)
    (root / "pods" / "seed-2").mkdir()
    (root / ".attempts" / "grpo-seed-1-1").mkdir(parents=True)
    (root / "experiment.yaml").write_text(plan)
    return root


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    with unrendered():
        return build_report(write_plan(tmp_path_factory.mktemp("planned")), resamples=20)


def test_every_planned_run_has_a_row(planned: ReportFiles) -> None:
    with planned.csv["runs"].open() as file:
        rows = [(row["arm"], row["seed"], row["state"], row["reason"]) for row in csv.DictReader(file)]
    assert sorted(rows) == [
        ("grpo", "1", "finished", ""),
        ("grpo", "2", "failed", "out of memory"),
        ("grpo", "3", "missing", "never started"),
        ("later", "1", "missing", "never started"),
        ("later", "2", "missing", "never started"),
        ("later", "3", "missing", "never started"),
        ("pods", "1", "finished", ""),
        ("pods", "2", "missing", "its directory holds no run"),
        ("pods", "3", "missing", "never started"),
    ]


def test_what_is_missing_is_said_in_words(planned: ReportFiles) -> None:
    notes = " ".join(planned.notes)
    assert "6 of 9 planned runs are missing (1 of grpo (16), 2 of pods (64→16), 3 of later; see Runs)." in notes
    assert "No run of later has begun: it is in no figure." in notes
    assert "1 of 3 runs did not finish (1 failed; see Runs)." in notes
    assert "Not counted: 1 earlier attempt of runs that failed or were stopped, kept in .attempts." in notes
    assert "9 runs: 6 missing, 2 finished, 1 failed." in planned.html.read_text()
    for note in planned.notes:
        assert note in planned.html.read_text()


def test_runs_that_did_not_end_well_come_first_for_a_reader(planned: ReportFiles) -> None:
    states = [cells[2] for cells in planned.tables["runs"].cells()]
    assert states[-2:] == ["finished", "finished"]


def test_arms_come_in_the_order_of_the_plan(planned: ReportFiles) -> None:
    assert [arm.name for arm in planned.analysis.arms] == ["grpo", "pods", "later"]


def test_a_count_of_seeds_is_1_to_k(tmp_path: Path) -> None:
    write_run(tmp_path / "grpo" / "seed-1", "grpo", 1)
    (tmp_path / "experiment.yaml").write_text("arms: {grpo: {}}\nseeds: 2\n")
    (arm,) = arms_from_runs([tmp_path], "accuracy")
    assert arm.missing == (Missing(2, "never started"),)


@pytest.mark.parametrize("plan", ["arms: [", "arms: 3\nseeds: {}", "- a", "arms: {grpo: {}}\nseeds: many", "\x00"])
def test_a_plan_that_says_nothing_plans_nothing(tmp_path: Path, plan: str) -> None:
    write_run(tmp_path / "grpo" / "seed-1", "grpo", 1)
    (tmp_path / "experiment.yaml").write_text(plan)
    (arm,) = arms_from_runs([tmp_path], "accuracy")
    assert arm.missing == ()


@pytest.mark.usefixtures("no_rendering")
def test_runs_that_share_no_checkpoint_are_drawn_and_compared_with_nothing(tmp_path: Path) -> None:
    for arm, seed, own in (("grpo", 1, slice(1, 3)), ("grpo", 2, slice(4, 6)), ("pods", 1, slice(2, 4))):
        path = write_run(tmp_path / arm / f"seed-{seed}", arm, seed)
        lines = (path / "evals.jsonl").read_text().splitlines()[own]  # the second run begins where the first has ended
        (path / "evals.jsonl").write_text("\n".join(lines))
    report = build_report(tmp_path, resamples=20)
    assert not report.analysis.speedups
    assert any("has no checkpoint that most of its runs share" in note for note in report.notes)
    assert report.headlines[0].startswith("pods (64→16) went from")
