"""Trackers of `report_to`: transformers' callbacks, with evaluations, names and folders of the run.

Each tracker writes under ``tracking/`` of the run, unless the user's own environment variables say otherwise.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..recipe import Recipe
from ..recipe.available import trackers
from ..runs import Run, to_json, write_atomic
from ..runs.files import TRACKING, read_mapping
from ..runs.run import logged_evaluation

if TYPE_CHECKING:
    from ..engines.trl import PODSTrainer
    from .recorder import Recorder

_STATE = "state.json"  # under tracking/: what the trackers have, and their own ids of the run
_SUMMARY = "train_runtime"  # in TRL's closing summary only
PROJECT = "pods-rl"  # of a run outside of an experiment


@contextmanager
def tracking(recipe: Recipe, output: Path, *, writes: bool) -> Iterator[None]:
    """Set the trackers' environment variables inside, and close what they began.

    Enter it before TRL is imported: it imports the trackers, and some read their variables then.

    Args:
        recipe: its `report_to`, `project` and `run_name` are read.
        output: the run directory.
        writes: whether this process writes the run directory.
    """
    names = trackers(recipe.values)
    wanted = {} if "mlflow" in names else {"DISABLE_MLFLOW_INTEGRATION": "TRUE"}  # or TRL imports it, a second
    if names:
        folder = output.resolve() / TRACKING
        state = read_mapping(folder / _STATE)
        if writes:
            folder.mkdir(exist_ok=True)
            if "wandb" not in state:
                state["wandb"] = secrets.token_hex(4)
                _write(folder, state)
        wanted |= _variables(recipe, Run(output), folder, state)
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    _move_trackio(added.get("TRACKIO_DIR"))
    if "mlflow" in names and (user := sys.modules.get("trl.extras.profiling")):  # by an earlier run without it
        user.mlflow = import_module("mlflow")  # type: ignore[attr-defined]
    temporary = {*added, "MLFLOW_EXPERIMENT_ID"} - ({*os.environ} - {*added})  # mlflow sets the last by itself
    failed = 1
    try:
        yield
        failed = 0
    finally:
        for name in temporary:
            os.environ.pop(name, None)
        _close(names, failed)


def _variables(recipe: Recipe, run: Run, folder: Path, state: Mapping[str, Any]) -> dict[str, str]:
    project, group, name = _project(recipe, run), run.arm or "", recipe.values.get("run_name") or run.name
    labels = {"experiment": run.experiment, "arm": run.arm, "seed": run.seed}
    tags = {key: str(value) for key, value in labels.items() if value is not None}
    return {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": project,
        "WANDB_NAME": name,
        "WANDB_RUN_ID": str(state.get("wandb", "")),
        "WANDB_RESUME": "allow",
        **({"WANDB_RUN_GROUP": group} if group else {}),
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # a database would need more than mlflow-skinny
        "MLFLOW_EXPERIMENT_NAME": project,
        "MLFLOW_TAGS": json.dumps(tags),
        **({"MLFLOW_RUN_ID": str(state["mlflow"])} if "mlflow" in state else {}),
    }


def _project(recipe: Recipe, run: Run) -> str:
    return recipe.values.get("project") or run.experiment or PROJECT


def _move_trackio(folder: str | None) -> None:
    """Set trackio's folder in its modules too, if they were imported before: they read the variable only then."""
    for name in [name for name in sys.modules if folder and name.partition(".")[0] == "trackio"]:
        if hasattr(sys.modules[name], "TRACKIO_DIR"):
            sys.modules[name].TRACKIO_DIR = Path(str(folder))  # type: ignore[attr-defined]


def _close(names: tuple[str, ...], failed: int) -> None:
    """End the runs that wandb and mlflow would keep open for the next run of this process."""
    wandb, mlflow = (sys.modules.get(name) if name in names else None for name in ("wandb", "mlflow"))
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=failed)
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.end_run("FAILED" if failed else "FINISHED")


def add_trackers(trainer: PODSTrainer, recorder: Recorder, recipe: Recipe, output: Path) -> None:
    """Have the trainer's trackers get evaluations, and the run's names and recipe as its configuration.

    They come after the recorder, whose last evaluation must reach them before they close. A resumed run repeats the
    steps since its checkpoint; the trackers have these already, so they are not sent again.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    kinds = tuple(INTEGRATION_TO_CALLBACK.values())
    callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, kinds)]
    if not callbacks:
        return
    run, args = Run(output), trainer.args
    args.run_name, args.project = args.run_name or run.name, _project(recipe, run)
    about = {**recipe.values, "experiment": run.experiment, "arm": run.arm}
    if "trackio" in trackers(recipe.values) and run.arm:
        about["_Group"] = run.arm  # trackio's own key of a group
    args.to_dict = partial(_described, args.to_dict, about)  # type: ignore[method-assign]
    sent = _Sent(output.resolve() / TRACKING, run, writes=recorder.writer is not None)
    for callback in callbacks:
        trainer.remove_callback(callback)
        trainer.add_callback(callback)
        callback.on_log = partial(sent.log_once, callback.on_log)
    trainer.add_callback(sent)

    def track(row: Mapping[str, Any]) -> None:
        for callback in callbacks:
            logs = logged_evaluation(row) | {"eval_num_tokens": trainer.state.num_input_tokens_seen}
            callback.on_log(args, trainer.state, trainer.control, logs=logs, model=trainer.model)

    recorder.track = track


def _described(original: Callable[[], dict[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    return {**original(), **about}


class _Sent(TrainerCallback):
    """What the trackers have: steps up to `_step`, and evaluations after the steps `_evaluated`."""

    def __init__(self, folder: Path, run: Run, *, writes: bool) -> None:
        self._folder, self._writes = folder, writes
        state = read_mapping(folder / _STATE)
        steps = [int(row.get("step") or 0) for row in run.metrics]  # before the run removes the later ones
        self._step = max([int(state.get("step") or 0), *steps])
        self._evaluated = {*state.get("evaluated", []), *(row.get("step") for row in run.evals)}
        self._save()

    def log_once(
        self, log: Callable[..., None], args: Any, state: Any, control: Any, logs: dict[str, Any], **rest: Any
    ) -> None:
        """Pass a row on to a tracker, unless it has it."""
        step = state.global_step
        known = step in self._evaluated if "eval_accuracy" in logs else step <= self._step and _SUMMARY not in logs
        if not known:
            log(args, state, control, logs={name: value for name, value in logs.items() if value is not None}, **rest)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        mlflow = sys.modules.get("mlflow")
        run = mlflow.active_run() if mlflow else None
        if run is not None:
            self._save(mlflow=run.info.run_id)

    def _save(self, **more: str) -> None:
        if self._writes:
            evaluated = sorted(step for step in self._evaluated if isinstance(step, int))
            state = read_mapping(self._folder / _STATE)
            _write(self._folder, state | {"step": self._step, "evaluated": evaluated} | more)


def _write(folder: Path, state: Mapping[str, Any]) -> None:
    write_atomic(folder / _STATE, to_json(state) + "\n")
