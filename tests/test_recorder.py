"""The training clock, when evaluations fall due, and what is written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pods_rl import recorder as recorder_module
from pods_rl.evaluation import Evaluation
from pods_rl.recorder import Recorder
from pods_rl.runs import Run, RunWriter


class Time:
    """Replaces the clock: seconds pass only when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Time()
    monkeypatch.setattr(recorder_module.time, "perf_counter", fake)
    monkeypatch.setattr(recorder_module.TrainingClock.__init__, "__defaults__", (0.0, fake))
    return fake


def evaluation(accuracy=0.5):
    return Evaluation(accuracy, 0.1, 1.0, accuracy, 10.0, 0.0, 4, 1, 1.0, 3.0)


def run_steps(tmp_path, clock, step_seconds, **settings):
    """Drives a recorder through steps of given lengths; every evaluation takes 100 seconds, every save 50."""
    seen, saved = [], settings.pop("saved", [])

    def evaluate(index):
        clock.now += 100.0
        seen.append(index)
        return evaluation()

    asked = settings.pop("asked", lambda: None)
    with RunWriter(tmp_path / "run") as writer:
        recorder = Recorder(
            writer, None, evaluate=evaluate, ledger=lambda: {"x": [1]}, stop_requested=asked, **settings
        )
        state, control = SimpleNamespace(global_step=0, log_history=[]), SimpleNamespace(should_training_stop=False)
        recorder.on_train_begin(None, state)
        for seconds in step_seconds:
            clock.now += seconds
            state.global_step += 1
            recorder.on_step_end(None, state, control)
            if getattr(control, "should_save", False):
                control.should_save = False
                clock.now += 50.0
                saved.append(state.global_step)
                recorder.on_save(None, state, control)
            state.log_history.append({"reward": 1.0})
            recorder.on_log(None, state, control, logs={"reward": 1.0})
            assert len(state.log_history) == 1  # what grows with the steps is in a file
            if control.should_training_stop:
                break
        recorder.on_log(None, state, control, logs={"train_runtime": 1.0})
        recorder.on_train_end()
        recorder.write_status("finished", recorder.stop_reason)
    return Run(tmp_path / "run"), recorder, seen


def test_evaluation_is_outside_the_training_clock(tmp_path, clock):
    run, _, seen = run_steps(tmp_path, clock, [4.0] * 10, max_seconds=20.0, eval_seconds=10.0)
    assert [row["seconds"] for row in run.metrics] == [4.0, 8.0, 12.0, 16.0, 20.0]
    assert [(row["due"], row["seconds"], row["step"]) for row in run.evals] == [
        (0.0, 0.0, 0),
        (10.0, 12.0, 3),
        (20.0, 20.0, 5),
    ]
    assert [row["elapsed"] for row in run.evals] == [100.0, 212.0, 320.0]
    assert seen == [0, 1, 2]
    assert run.status["reason"] == "max_seconds 20 reached"
    assert run.status["seconds"] == 20.0


def test_a_step_longer_than_an_interval_evaluates_once(tmp_path, clock):
    run, _, _ = run_steps(tmp_path, clock, [35.0, 1.0], eval_seconds=10.0)
    assert [row["due"] for row in run.evals] == [0.0, 30.0, 40.0]
    assert run.evals[-1]["seconds"] == 36.0


def test_without_an_interval_it_evaluates_at_both_ends(tmp_path, clock):
    run, _, _ = run_steps(tmp_path, clock, [1.0, 1.0])
    assert [row["due"] for row in run.evals] == [0.0, 2.0]


def test_a_request_to_stop_ends_after_the_step(tmp_path, clock):
    asked = iter([None, "interrupted by SIGINT"])
    run, recorder, _ = run_steps(tmp_path, clock, [1.0] * 9, asked=lambda: next(asked))
    assert len(run.metrics) == 2
    assert recorder.stop_reason == "interrupted by SIGINT"


def test_checkpoints_are_saved_by_the_clock_and_off_it(tmp_path, clock):
    saved = []
    run, _, _ = run_steps(tmp_path, clock, [4.0] * 6, save_seconds=10.0, max_seconds=24.0, saved=saved)
    assert saved == [3, 5]
    assert [row["seconds"] for row in run.metrics] == [4.0, 8.0, 12.0, 16.0, 20.0, 24.0]


def test_the_ledger_is_sampled(tmp_path, clock):
    run, _, _ = run_steps(tmp_path, clock, [1.0] * 7, ledger_every=3)
    assert [path.name for path in run.rollout_files()] == [f"step-00000{i}.parquet" for i in (1, 3, 6)]


def test_nothing_but_json_numbers_is_written(tmp_path, clock):
    run, _, _ = run_steps(tmp_path, clock, [1.0])
    for name in ("metrics.jsonl", "evals.jsonl"):
        for line in (run.path / name).read_text().splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(word))
