"""The run directory survives what happens to directories: kills, torn lines, two writers, odd numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pods_rl.errors import UserError
from pods_rl.runs import Run, RunWriter, find_runs, write_atomic


def make_run(path, *, seed=1, state="finished"):
    with RunWriter(path) as writer:
        writer.write_config(f"seed: {seed}\n")
        writer.write_status(state)
    return Run.open(path)


def test_what_is_written_is_read(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write_config("seed: 3\nlearning_rate: 1.0e-06\n")
        writer.write_environment({"device": "cpu"})
        writer.append_metrics({"step": 1, "seconds": 0.5, "reward": 0.25})
        writer.append_eval({"step": 0, "accuracy": 0.3})
        writer.write_rollouts(1, {"step": [1, 1], "reward/accuracy": [1.0, None], "completion": ["a", "ü"]})
        writer.write_status("finished", reason="max_seconds", step=1, seconds=0.5, elapsed=0.75)
    run = Run.open(tmp_path / "run")
    assert run.config == {"seed": 3, "learning_rate": 1e-06}
    assert run.environment == {"device": "cpu"}
    assert run.metrics == [{"step": 1, "seconds": 0.5, "reward": 0.25}]
    assert run.evals == [{"step": 0, "accuracy": 0.3}]
    assert run.status == {
        "state": "finished",
        "reason": "max_seconds",
        "step": 1,
        "seconds": 0.5,
        "elapsed": 0.75,
    }
    assert (run.state, run.seed) == ("finished", 3)
    assert [f.name for f in run.rollout_files()] == ["step-000001.parquet"]
    import pyarrow.parquet as pq

    table = pq.read_table(run.rollout_files()[0])
    assert table.to_pydict() == {"step": [1, 1], "reward/accuracy": [1.0, None], "completion": ["a", "ü"]}


def test_a_line_is_on_disk_before_the_next_begins(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.append_metrics({"step": 1})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_torn_and_missing_files_read_as_what_is_left(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: [1")
    (tmp_path / "status.json").write_text('{"state": "runn')
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n[1]\n{"step": 2, "rew\xff')
    run = Run.open(tmp_path)
    assert (run.config, run.status, run.environment, run.evals) == ({}, {}, {}, [])
    assert (run.state, run.seed, run.rollout_files(), run.final_checkpoint) == ("unknown", None, [], None)
    assert run.metrics == [{"step": 1}]


def test_a_resumed_run_starts_on_its_own_line(tmp_path):
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    with RunWriter(tmp_path, resume=True) as writer:
        writer.append_metrics({"step": 2})
    assert Run.open(tmp_path).metrics == [{"step": 1}, {"step": 2}]


def test_rewind_forgets_what_came_after_the_checkpoint(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.append_metrics({"step": step})
            writer.append_eval({"step": step})
            writer.write_rollouts(step, {"step": [step]})
        writer.rewind(1, evaluations=9)
        writer.append_metrics({"step": 2, "again": True})
        writer.write_config("")
    run = Run.open(tmp_path)
    assert run.metrics == [{"step": 1}, {"step": 2, "again": True}]
    assert run.evals == [{"step": 1}]
    assert [f.stem for f in run.rollout_files()] == ["step-000001"]


def test_rewind_takes_a_damaged_step(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.append_eval({"step": 1, "accuracy": 0.5})
        writer.append_eval({"step": [1], "accuracy": 0.5})
        writer.write_evaluation(1, {"answer": ["a"]})
        writer.write_evaluation(2, {"answer": ["a"]})
        writer.rewind(1, 2)
        assert [path.name for path in Run(tmp_path / "run").evaluation_files()] == ["step-000001.parquet"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_becomes_null(tmp_path, value):
    with RunWriter(tmp_path) as writer:
        writer.append_metrics({"loss": value, "deep": [{"x": value}]})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss": null, "deep": [{"x": null}]}\n'


def test_numpy_scalars_paths_and_lone_surrogates_are_written(tmp_path):
    import numpy as np

    with RunWriter(tmp_path) as writer:
        writer.append_metrics({"a": np.float32(0.5), "b": np.arange(2), "c": tmp_path, "d": "\udc80", "e": True})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"a": 0.5, "b": [0, 1], "c": str(tmp_path), "d": "\udc80", "e": True}


def test_a_directory_with_a_run_is_refused_and_left_alone(tmp_path):
    make_run(tmp_path, seed=7)
    with pytest.raises(UserError, match=r"already holds a run \(finished\).*--output.*--resume"):
        RunWriter(tmp_path)
    assert Run.open(tmp_path).config == {"seed": 7}
    RunWriter(tmp_path, resume=True).close()  # the refused writer gave the lock back


def test_two_writers_of_one_process_are_told_apart(tmp_path):
    with RunWriter(tmp_path), pytest.raises(UserError, match=f"is in use: process {os.getpid()}"):
        RunWriter(tmp_path, resume=True)
    RunWriter(tmp_path, resume=True).close()


def test_a_second_process_is_refused_and_a_dead_one_leaves_no_lock(tmp_path):
    code = f"from pods_rl.runs import RunWriter; RunWriter({str(tmp_path)!r}, resume=True); print('in')"
    with RunWriter(tmp_path):
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "is in use" in refused.stderr
    killed = code + "; import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed], capture_output=True).returncode == -9
    RunWriter(tmp_path, resume=True).close()


def test_a_place_that_cannot_be_written_is_a_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write to .*--output"):
        RunWriter(tmp_path / "file")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "status.json"
    write_atomic(target, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_reader_of_the_old_file_keeps_it(tmp_path):
    write_atomic(tmp_path / "status.json", "old")
    with (tmp_path / "status.json").open() as reader:
        write_atomic(tmp_path / "status.json", "new")
        assert reader.read() == "old"
    assert (tmp_path / "status.json").read_text() == "new"


def test_a_failed_ledger_leaves_no_part(tmp_path):
    with RunWriter(tmp_path) as writer:
        with pytest.raises(Exception, match="expected length"):
            writer.write_rollouts(1, {"a": [1], "b": [1, 2]})
        assert list((tmp_path / "rollouts").iterdir()) == []


def test_an_unknown_state_is_refused(tmp_path):
    with RunWriter(tmp_path) as writer, pytest.raises(ValueError, match="'done', expected one of running"):
        writer.write_status("done")


def test_find_runs_orders_arms_as_declared_and_runs_by_seed(tmp_path):
    for arm in ("a", "b"):
        for seed in (10, 2):
            make_run(tmp_path / arm / f"seed-{seed}", seed=seed)
    (tmp_path / "report").mkdir()
    found = find_runs(tmp_path)
    assert {arm: [run.seed for run in runs] for arm, runs in found.items()} == {"a": [2, 10], "b": [2, 10]}
    (tmp_path / "experiment.yaml").write_text("arms:\n  b: {}\n  a: {}\n")
    assert list(find_runs(tmp_path)) == ["b", "a"]


def test_find_runs_takes_plain_runs_and_a_run_itself(tmp_path):
    make_run(tmp_path / "mine")
    assert [run.path.name for run in find_runs(tmp_path)["mine"]] == ["mine"]
    assert list(find_runs(tmp_path / "mine")) == ["mine"]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run directory: expected .*config\.yaml"):
        Run.open(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="does not exist"):
        find_runs(tmp_path / "nowhere")
