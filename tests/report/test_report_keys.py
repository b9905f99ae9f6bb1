"""A report reads what a run writes: the keys of its files, from a run that the real command trained."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields
from pods_rl.report import build_report
from pods_rl.report.comparable import NO_MATTER, OWN_TO_A_RUN
from pods_rl.runs import Run

# a run without tools, trackers or a resume writes no such values
ELSEWHERE = {
    "metrics": {"tools/call_frequency", "tools/failure_frequency"},
    "evals": {"answer_accuracy", "answer_accuracy_se", "mean_completion_tokens_se"},  # columns of a CSV
}
NOT_OF_A_RECIPE = {"label", "output_dir", "logging_dir", "resume"}  # `label`: skipped in what the page compares


class Recording(dict):
    """A mapping that records the keys that are read."""

    def __init__(self, content: dict[str, Any], read: set[str]) -> None:
        super().__init__(content)
        self.read = read

    def get(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """By file, the keys that a report reads."""
    read: dict[str, set[str]] = {name: set() for name in ("config", "environment", "status", "metrics", "evals")}

    def recorded(name: str) -> Any:
        original = Run.__dict__[name].func

        def content(run: Run) -> Any:
            kept = run.__dict__.setdefault(f"_recorded_{name}", None)
            if kept is None:
                value = original(run)
                if isinstance(value, list):
                    kept = [Recording(row, read[name]) for row in value]
                else:
                    kept = Recording(value, read[name])
                run.__dict__[f"_recorded_{name}"] = kept
            return kept

        return property(content)

    for name in read:
        monkeypatch.setattr(Run, name, recorded(name))
    return read


def test_every_key_that_a_report_reads_is_one_that_a_run_writes(
    real_runs: Path, tmp_path: Path, keys_read: dict[str, set[str]]
) -> None:
    run = Run(real_runs / "pods" / "seed-1")
    written = {
        "config": set(run.config),
        "environment": set(run.environment),
        "status": set(run.status),
        "metrics": {key for row in run.metrics for key in row},
        "evals": {key for row in run.evals for key in row},
    }
    for read in keys_read.values():
        read.clear()
    build_report(real_runs, tmp_path / "out")
    assert all(keys_read.values())
    keys_read["config"] -= NOT_OF_A_RECIPE | set(fields())
    for name, read in keys_read.items():
        assert read - written[name] - ELSEWHERE.get(name, set()) == set(), name


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
    assert analysis is not None
    assert [arm.run_count for arm in analysis.arms] == [2]
    config.write_text(config.read_text().replace("max_steps: 2", "max_steps: 3"))
    with pytest.raises(UserError, match="max_steps"):
        build_report(root, tmp_path / "out", baseline="none")
