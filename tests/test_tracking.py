"""What only watches a run cannot end it: trackers, the display, the ledger, the push to the hub."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers.integrations.integration_utils import TensorBoardCallback

from pods_rl.runs import Run
from pods_rl.training.display import RunDisplay, Watcher
from pods_rl.training.recorder import add_trackers, push

from .cli import pods
from .reliability.commands import RECIPE


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("the server is gone")


def test_a_watcher_passes_on_what_must_end_the_run():
    with pytest.raises(OSError, match="disk"):
        Watcher("a file", raises=(OSError,)).attempt(lambda: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(KeyboardInterrupt):
        Watcher("a file").attempt(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_dropped_tracker_leaves_report_to(monkeypatch):
    monkeypatch.setattr(TensorBoardCallback, "on_log", fails)
    args = SimpleNamespace(run_name=None, report_to=["tensorboard", "wandb"])
    trainer = SimpleNamespace(args=args, callback_handler=SimpleNamespace(callbacks=[TensorBoardCallback(object())]))
    add_trackers(trainer, "mine")
    (callback,) = trainer.callback_handler.callbacks
    callback.on_log(args, None, None)
    assert (args.run_name, args.report_to) == ("mine", ["wandb"])


def start(place: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> str:
    """Train in this process and return what is printed to standard error."""
    monkeypatch.chdir(place)
    watched = {"report_to": ["tensorboard"], "eval_prompts": 2, "max_steps": 3, "ledger_every": 1, "save_steps": 2}
    Path("r.yaml").write_text(yaml.safe_dump(RECIPE | watched | changes))
    return str(pods("train", "--config", "r.yaml", "--output", "run").stderr)


@pytest.mark.slow
def test_a_run_continues_without_whatever_watches_it(tmp_path, monkeypatch):
    """The tracker, the display and the ledger all raise in the first step."""
    monkeypatch.setattr(TensorBoardCallback, "on_log", fails)
    monkeypatch.setattr("pods_rl.runs.run.write_parquet", fails)
    monkeypatch.setattr(RunDisplay, "step", fails)
    said = start(tmp_path, monkeypatch)
    for name in ("tensorboard", "the progress display", "a file of"):
        assert said.count(f"{name} ") == 1, said
    run = Run.open(tmp_path / "run")
    assert (run.state, [row["step"] for row in run.metrics]) == ("finished", [1, 2, 3])
    assert run.final_checkpoint is not None
    assert json.loads((run.path / "checkpoints/final/manifest.json").read_text())["step"] == 3


@pytest.mark.slow
def test_trackers_get_each_step_and_each_evaluation_and_write_inside_the_run(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start(tmp_path, monkeypatch)
    events = EventAccumulator(str(tmp_path / "run/tracking/tensorboard")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in ("train/reward", "eval/accuracy")}
    assert steps == {"train/reward": [1, 2, 3], "eval/accuracy": [0, 3]}
    run = Run.open(tmp_path / "run")
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert [row["step"] for row in run.evals] == [0, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml", "run"]
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ


@pytest.mark.parametrize("fails", [False, True])
def test_the_final_policy_is_pushed_and_a_failure_is_a_warning(tmp_path, capsys, fails):
    pushed = []

    def push_to_hub():
        if fails:
            raise OSError("the hub is full")
        pushed.append((trainer.args.output_dir, trainer.args.hub_model_id))

    trainer = SimpleNamespace(push_to_hub=push_to_hub, args=SimpleNamespace(output_dir="before", hub_model_id=None))
    push(trainer, tmp_path, "sums/pods seed-1")
    assert pushed == [] if fails else [(str(tmp_path), "sums-pods-seed-1")]
    assert ("the hub is full" in capsys.readouterr().err) == fails
    assert trainer.args.output_dir == "before"
