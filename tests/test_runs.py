"""The run directory survives what happens to directories: kills, torn lines, two writers, odd numbers."""

import json
import math
import os
import socket
import subprocess
import sys

import pytest

from pods_rl.errors import UserError
from pods_rl.runs import Run, RunInUseError, RunWriter, end_run, find_runs, write_atomic
from pods_rl.runs.files import write_output
from pods_rl.runs.identity import token_of
from pods_rl.runs.progress import progress_of


def make_run(path, *, seed=1, state="finished"):
    with RunWriter(path) as writer:
        writer.write_config(f"seed: {seed}\n")
        writer.write_status(state)
    return Run.open(path)


@pytest.mark.parametrize("text", ['{"step": [1], "seconds": NaN, "elapsed": "x"}', "[]"])
def test_a_damaged_status_does_not_keep_a_run_from_its_end(tmp_path, text):
    run = make_run(tmp_path / "run", state="running")
    (run.path / "status.json").write_text(text)
    assert (Run(run.path).step, Run(run.path).seconds, Run(run.path).elapsed) == (0, 0.0, 0.0)
    with RunWriter(run.path, resume=True) as writer:
        writer.write_status("failed", reason="why")
    assert Run(run.path).status == {"state": "failed", "reason": "why", "step": 0, "seconds": 0.0, "elapsed": 0.0}
    (run.path / "status.json").write_text(text)
    assert end_run(run.path, "stopped", "why")
    assert Run(run.path).status == {"state": "stopped", "reason": "why", "step": 0, "seconds": 0.0, "elapsed": 0.0}


def test_a_run_that_is_ended_from_outside_keeps_its_last_step(tmp_path):
    clocks = {"step": 3, "seconds": 5.0, "elapsed": 6.0}
    run = make_run(tmp_path / "run", state="running")
    with RunWriter(run.path, resume=True) as writer:
        writer.append_metrics(clocks | {"loss": 0.5})
    assert end_run(run.path, "failed", "killed")
    assert Run(run.path).status == {"state": "failed", "reason": "killed", **clocks}


def test_torn_and_missing_files_read_as_what_is_left(tmp_path):
    (tmp_path / "config.yaml").write_text("a: " + "[" * 3_000)  # too deep for the stack
    (tmp_path / "status.json").write_text('{"state": "runn')
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n[1]\n{"step": 2, "rew\xff')
    run = Run.open(tmp_path)
    assert (run.config, run.status, run.environment, run.evals) == ({}, {}, {}, [])
    assert (run.state, run.seed, run.rollout_files(), run.final_checkpoint) == ("unknown", None, [], None)
    assert run.metrics == [{"step": 1}]


def test_a_resumed_run_removes_a_torn_line(tmp_path):
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    with RunWriter(tmp_path, resume=True) as writer:
        writer.rewind(2, evaluations=0)
        writer.append_metrics({"step": 2})
    assert Run.open(tmp_path).metrics == [{"step": 1}, {"step": 2}]


def test_a_directory_with_a_run_is_refused_and_left_alone(tmp_path):
    make_run(tmp_path, seed=7)
    with pytest.raises(UserError, match=r"\(finished\).*--output.*--resume"):
        RunWriter(tmp_path)
    assert Run.open(tmp_path).config == {"seed": 7}
    RunWriter(tmp_path, resume=True).close()  # the refused writer gave the lock back


def test_a_second_process_is_refused_and_a_dead_one_leaves_no_lock(tmp_path):
    code = f"from pods_rl.runs import RunWriter; RunWriter({str(tmp_path)!r}, resume=True); print('in')"
    (tmp_path / "link").symlink_to(tmp_path)
    with RunWriter(tmp_path):
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"process {os.getpid()}" in refused.stderr
        with pytest.raises(RunInUseError):
            RunWriter(tmp_path / "link", resume=True)
    killed = code + "; import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed], capture_output=True).returncode == -9
    RunWriter(tmp_path, resume=True).close()


def test_rewind_removes_what_came_after_the_checkpoint_and_leaves_the_users_files(tmp_path):
    mine = ["step-best-3.parquet", "step-000003.bak.parquet", "step-x.parquet"]
    with RunWriter(tmp_path) as writer:
        for folder, write in (("rollouts", writer.write_rollouts), ("evaluations", writer.write_evaluation)):
            for step in (1, 3):
                write(step, {"step": [step]})
            for name in mine:
                (tmp_path / folder / name).touch()
            (tmp_path / folder / "step-000004.parquet").mkdir()
        for step in (1, 2):
            writer.append_metrics({"step": step})
            writer.append_eval({"step": step})
        writer.rewind(1, evaluations=9)
        writer.append_metrics({"step": 2, "again": True})
    assert Run(tmp_path).metrics == [{"step": 1}, {"step": 2, "again": True}]
    assert Run(tmp_path).evals == [{"step": 1}]
    for folder in ("rollouts", "evaluations"):
        left = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert left == sorted([*mine, "step-000001.parquet", "step-000004.parquet"])


# --------------------------------------------------------------------------------------- one file in another's place


def test_a_link_is_followed_where_the_user_names_it_and_else_replaced(tmp_path):
    target, link = tmp_path / "file", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, "--output", "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    write_atomic(link, "newer")
    assert (link.is_symlink(), target.read_text(), link.read_text()) == (False, "new", "newer")


SURROGATE = "a\udcffb\ud800"


def test_every_file_of_a_run_takes_any_text(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write_config(f"run_name: {SURROGATE}\n")
        writer.write_environment({"command": [SURROGATE], SURROGATE: 1})
        writer.write_status("running", reason=SURROGATE)
        writer.append_metrics({SURROGATE: SURROGATE})
        writer.append_eval({"x": [SURROGATE]})
        columns = {"text": [SURROGATE], SURROGATE: [1], "chat": [[{"role": "user", "content": SURROGATE}]]}
        writer.write_rollouts(1, columns)
        writer.write_evaluation(1, columns)
    run = Run.open(path)
    assert run.environment == {"command": [SURROGATE], SURROGATE: 1, "run": token_of(path)}
    assert run.status["reason"] == SURROGATE
    assert run.metrics == [{SURROGATE: SURROGATE}]
    assert len(run.rollout_files()) == len(run.evaluation_files()) == 1


def test_a_place_that_cannot_be_written_is_a_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*directory"):
        RunWriter(tmp_path / "file")


def test_find_runs_orders_arms_as_declared_and_runs_by_seed(tmp_path):
    for arm in ("a", "b"):
        for seed in (10, 2):
            make_run(tmp_path / arm / f"seed-{seed}", seed=seed)
    (tmp_path / "report").mkdir()
    found = find_runs(tmp_path)
    assert {arm: [run.seed for run in runs] for arm, runs in found.items()} == {"a": [2, 10], "b": [2, 10]}
    (tmp_path / "experiment.yaml").write_text("arms:\n  b: {}\n  a: {}\n")
    assert list(find_runs(tmp_path)) == ["b", "a"]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.yaml"):
        Run.open(tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        find_runs(tmp_path / "nowhere")


def test_how_far_a_run_is_is_its_share_of_the_budget_that_ends_first(tmp_path):
    def progress(config, row, status="{}", recipe=None):
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        (tmp_path / "status.json").write_text(status)
        (tmp_path / "metrics.jsonl").write_text(row)
        return progress_of(Run(tmp_path), recipe)

    row = '{"step": 30, "seconds": 150.0, "epoch": 0.6}'
    assert progress({"max_seconds": 300, "max_steps": 40}, row).share == 0.75
    assert progress({"max_seconds": 300, "max_steps": -1}, row).share == 0.5
    assert progress({"max_steps": 20}, row).share == 1.0
    assert progress({"num_train_epochs": 3}, row).share == pytest.approx(0.2)
    assert math.isnan(progress({}, row).share)
    assert progress({}, row, recipe={"max_steps": 120}).share == 0.25
    ahead = progress({"max_steps": 40}, row, '{"step": 36, "seconds": 1}')
    assert (ahead.step, ahead.seconds, ahead.share) == (36, 150.0, 0.9)
    assert math.isnan(progress({"max_steps": "many"}, '{"step": "soon"}').share)


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    """As the process of a reward does, which may outlive a killed run for a moment."""
    writer = RunWriter(tmp_path)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        theirs.send(b"forked")
        theirs.recv(1)  # until the test is over
        os._exit(0)
    theirs.close()
    ours.recv(len(b"forked"))
    writer.close()
    try:
        RunWriter(tmp_path, resume=True).close()
    finally:
        ours.close()
        os.waitpid(child, 0)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "status.json"
    write_atomic(target, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_run_that_never_began_leaves_no_directory(tmp_path):
    RunWriter(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    RunWriter(tmp_path / "mine").close()
    assert (tmp_path / "mine").exists()
