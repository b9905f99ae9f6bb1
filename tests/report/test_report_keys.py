"""A report reads what a run writes: the keys of its files, from a run that the real command trained."""

import csv
import shutil
from pathlib import Path

import pytest

from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields
from pods_rl.report import build_report
from pods_rl.report.comparable import NO_MATTER, OWN_TO_A_RUN
from pods_rl.runs import Run

NOT_OF_A_RECIPE = {"label", "output_dir", "logging_dir", "resume"}  # `label`: skipped in what the page compares


def test_keys_that_do_not_tell_recipes_apart_exist() -> None:
    assert set(fields()) >= (OWN_TO_A_RUN | NO_MATTER) - NOT_OF_A_RECIPE


def test_the_tables_have_what_a_real_run_is(real_runs: Path, tmp_path: Path) -> None:
    report = build_report(real_runs, tmp_path / "out")
    run = Run(real_runs / "pods" / "seed-1")
    (row,) = csv.DictReader(report.csv["runs"].read_text().splitlines())
    assert row["dtype"] == run.environment["precision"] == "float32"
    assert (row["device"], row["processor"]) == ("cpu", run.environment["processor"])
    assert all(row[key] for key in ("arm", "run", "seed", "state", "steps", "seconds", "evaluations", "last_score"))
    (final,) = csv.DictReader(report.csv["final"].read_text().splitlines())
    empty = {key for key, value in final.items() if not value}
    # of one run without a baseline
    assert empty == {"unfinished", "final_low", "final_high", "threshold", "hours_to_p99"}
    assert final["task"] == "arithmetic"
    assert report.account.ledger.rollouts == 32  # two steps


def test_copies_of_a_real_run_are_pooled_if_they_are_seeds_of_one_recipe(real_runs: Path, tmp_path: Path) -> None:
    """A copy with another seed is; one with another budget too is not."""
    root = tmp_path / "work"
    shutil.copytree(real_runs, root)
    copy = root / "pods" / "seed-2"
    shutil.copytree(root / "pods" / "seed-1", copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 1\n", "\nseed: 2\n"))
    analysis = build_report(root, tmp_path / "out", baseline="none").account.analysis
    assert [arm.run_count for arm in analysis.arms] == [2]
    config.write_text(config.read_text().replace("max_steps: 2", "max_steps: 3"))
    with pytest.raises(UserError, match="max_steps"):
        build_report(root, tmp_path / "out", baseline="none")
