"""The training clock, when evaluations fall due, and what is written."""

import json
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pods_rl.distributed.signals import Stop
from pods_rl.errors import Interrupted
from pods_rl.evaluation import Evaluation
from pods_rl.recipe import Origin, build_recipe
from pods_rl.runs import Run, RunWriter
from pods_rl.training import recorder as recorder_module
from pods_rl.training.context import Context
from pods_rl.training.recorder import Recorder, trackers_inside

RECIPE = {"model_name_or_path": "tiny", "max_steps": 9, "ledger_every": 0}


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock: seconds pass only when a test says so."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(time, "process_time", lambda: fake.now / 2)
    return fake


def evaluation(accuracy=0.5):
    return Evaluation({"accuracy": accuracy, "format_accuracy": 1.0})


def run_steps(tmp_path, clock, step_seconds, **settings):
    """Drives a recorder through steps of given lengths; every evaluation takes 100 seconds, every save 50.

    `checkpoints` gets what a checkpoint after each step would hold; `resumed` is one of them, to go on from.
    """
    seen, saved = [], settings.pop("saved", [])
    checkpoints, resumed = settings.pop("checkpoints", []), settings.pop("resumed", None)
    shuffling = settings.pop("shuffling", 0.0)
    failing = settings.pop("failing", None)  # an evaluation

    def evaluate(index):
        if index == failing:
            raise RuntimeError("no judge")
        clock.now += 100.0
        seen.append(index)
        return evaluation()

    stop = Stop()
    args = SimpleNamespace(clock=settings.pop("counts", "wall"), report_to=settings.pop("report_to", []))
    trainer = SimpleNamespace(
        args=args, attention=None, generation="prefix trees", token_budget=None, log_evaluation=lambda row: None,
        model=None, _save_checkpoint=lambda model, trial: saved.append("at the end"),
    )  # fmt: skip
    recipe = build_recipe(RECIPE | settings, Origin("a test"))
    with RunWriter(tmp_path / "run", resume=resumed is not None) as writer, stop.later():
        shown = Mock()
        context = Context(recipe, tmp_path / "run", writer, shown, stop)
        recorder = Recorder(context, trainer, {}, evaluate=evaluate, ledger=lambda: {"x": [1]})
        state = SimpleNamespace(
            **json.loads(resumed or '{"global_step": 0, "max_steps": 9, "stateful_callbacks": {}, "log_history": []}')
        )
        control = SimpleNamespace(should_training_stop=False, should_save=False)
        recorder.on_train_begin(None, state, control)
        shown.expect_steps.assert_called_once_with(9)
        recorder.on_epoch_begin()
        clock.now += shuffling
        for seconds in step_seconds:
            recorder.on_step_begin()
            clock.now += seconds
            state.global_step += 1
            recorder.on_step_end(None, state, control)
            checkpoints.append(json.dumps(vars(state)))
            if control.should_save:
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


def test_the_order_of_prompts_is_outside_the_training_clock(tmp_path, clock):
    run, _, _ = run_steps(tmp_path, clock, [4.0], shuffling=30.0)
    assert [row["seconds"] for row in run.metrics] == [4.0]


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


def test_the_clock_may_count_processor_time(tmp_path, clock):
    """Here half of the seconds; evaluation is off this clock too, and a resumed run continues it."""
    settings, checkpoints = {"max_seconds": 12.0, "eval_seconds": 4.0, "counts": "cpu"}, []
    run, _, _ = run_steps(tmp_path, clock, [4.0] * 3, checkpoints=checkpoints, **settings)
    run, _, _ = run_steps(tmp_path, clock, [4.0] * 9, resumed=checkpoints[-1], **settings)
    assert [(row["due"], row["seconds"], row["step"]) for row in run.evals] == [
        (0.0, 0.0, 0), (4.0, 4.0, 2), (8.0, 8.0, 4), (12.0, 12.0, 6),
    ]  # fmt: skip
    assert run.status["reason"] == "max_seconds 12 reached"


def test_the_folder_of_trackers_is_made_when_training_begins(tmp_path, clock):
    with trackers_inside(tmp_path, ["wandb"]):
        assert not (tmp_path / "tracking").exists()
    run, _, _ = run_steps(tmp_path, clock, [1.0], report_to=["wandb"])
    assert (run.path / "tracking").is_dir()


def test_a_signal_that_one_process_of_several_gets_ends_all(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(recorder_module, "gather", lambda items: [*items, (77.0, str(Interrupted(signal.SIGTERM)))])
    _, recorder, _ = run_steps(tmp_path, clock, [1.0] * 9)
    assert (recorder.step, recorder.seconds, recorder.stopped_by) == (1, 1.0, str(Interrupted(signal.SIGTERM)))


def test_checkpoints_are_saved_by_the_clock_and_off_it(tmp_path, clock):
    saved = []
    run, recorder, _ = run_steps(tmp_path, clock, [4.0] * 6, save_seconds=10.0, max_seconds=24.0, saved=saved)
    assert saved == [3, 5]
    assert recorder.stopped_by is None
    assert [row["seconds"] for row in run.metrics] == [4.0, 8.0, 12.0, 16.0, 20.0, 24.0]


def test_a_last_evaluation_that_fails_costs_no_step(tmp_path, clock):
    for save_seconds, checkpoints in {1800.0: ["at the end"], 4.0: [1]}.items():
        saved = []
        place = tmp_path / str(save_seconds)
        with pytest.raises(RuntimeError):
            run_steps(place, clock, [4.0], failing=1, saved=saved, save_seconds=save_seconds)
        assert saved == checkpoints


def test_a_resumed_run_goes_on_with_clocks_and_evaluations(tmp_path, clock):
    whole, _, _ = run_steps(tmp_path / "whole", clock, [4.0] * 7, eval_seconds=10.0)
    clock.now, checkpoints = 0.0, []
    killed, _, _ = run_steps(tmp_path, clock, [4.0] * 4, eval_seconds=10.0, checkpoints=checkpoints)
    # Ended after step 4, before the second interval was over: an evaluation that no whole run makes.
    assert [(row["step"], row["due"]) for row in killed.evals] == [(0, 0.0), (3, 10.0), (4, 20.0)]
    clock.now += 1000.0
    run, _, seen = run_steps(tmp_path, clock, [4.0] * 3, eval_seconds=10.0, resumed=checkpoints[3])
    assert run.metrics == whole.metrics
    assert run.evals == whole.evals
    assert [path.name for path in run.evaluation_files()] == [path.name for path in whole.evaluation_files()]
    assert seen == [2, 3]
    assert run.status == whole.status


def test_the_ledger_is_sampled(tmp_path, clock):
    run, _, _ = run_steps(tmp_path, clock, [1.0] * 7, ledger_every=3)
    assert [path.name for path in run.rollout_files()] == [f"step-00000{i}.parquet" for i in (1, 3, 6)]
