"""Trackers of `report_to`: transformers' callbacks, which get evaluations too and cannot end the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, Trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl.extras.profiling import ProfilingContext

from ..errors import UserError
from ..runs.files import TRACKING, write_failure
from ..runs.run import logged_evaluation
from .watcher import Watcher

# where each tracker writes, below `tracking/`; by default the working directory, and trackio a cache
_FOLDERS = {
    "TENSORBOARD_LOGGING_DIR": "tensorboard",
    "WANDB_DIR": "",
    "WANDB_DATA_DIR": "wandb-data",
    "TRACKIO_DIR": "trackio",
    "SWANLAB_LOG_DIR": "swanlab",
}


def add_trackers(trainer: Trainer, name: str) -> None:
    """Watch the trainer's trackers, which come last: the recorder's last evaluation must reach them before they close.

    Args:
        trainer: its recorder is already added.
        name: what trackers call the run, unless the recipe names it.
    """
    trainer.args.run_name = trainer.args.run_name or name
    handler, kinds = trainer.callback_handler, {kind: name for name, kind in INTEGRATION_TO_CALLBACK.items()}
    found = [each for each in handler.callbacks if isinstance(each, (*kinds, ProgressCallback))]
    for callback in found:
        tracker = kinds.get(type(callback))
        handler.callbacks.remove(callback)
        drop = partial(_forget, trainer, tracker)
        handler.callbacks.append(Watcher(tracker or "the progress display", callback, on_drop=drop))


def _forget(trainer: Trainer, tracker: str | None) -> None:
    """Take a tracker out of `report_to`, where TRL looks it up for its own tables."""
    trainer.args.report_to = [name for name in trainer.args.report_to if name != tracker]


def track_evaluation(trainer: Trainer, row: Mapping[str, Any]) -> None:
    """Log an evaluation. TRL's own `log` would also log and clear the metrics of a step that still runs."""
    logs_next = trainer.control.should_log  # `log` resets it, and this may come before the log of a step
    Trainer.log(trainer, logged_evaluation(row))
    trainer.control.should_log = logs_next


@contextmanager
def logging_watched(trainer: Trainer) -> Iterator[None]:
    """Inside, what TRL itself sends to trackers cannot end the run: times of its phases, and tables of completions."""
    log, profile = trainer.log, ProfilingContext._log_metrics
    profiler, table = Watcher("TRL's profiler"), Watcher("the table of completions")

    def logged(logs: dict[str, float], *args: Any) -> None:
        try:
            log(logs, *args)
        except Exception as error:
            if not trainer.log_completions or isinstance(error, UserError) or write_failure(error):
                raise
            trainer.log_completions = False
            table.drop(error)

    trainer.log = logged
    ProfilingContext._log_metrics = lambda self, seconds: profiler.attempt(profile, self, seconds)
    try:
        yield
    finally:
        del trainer.log
        ProfilingContext._log_metrics = profile


@contextmanager
def trackers_inside(output: Path, report_to: object) -> Iterator[None]:
    """Inside, trackers write their local files to ``tracking/`` of a run, unless the user has chosen another place."""
    if report_to in (None, "none", []):
        yield
        return
    place = (output / TRACKING).absolute()
    ours = {name: str(place / folder) for name, folder in _FOLDERS.items()} | {"MLFLOW_TRACKING_URI": place.as_uri()}
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    place.mkdir(exist_ok=True)  # wandb uses the system's temporary folder if it is missing
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
