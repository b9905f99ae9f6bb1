"""Where a run is reported: the trackers of `report_to`, which also get evaluations, and the hub."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, Trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..runs.files import TRACKING
from ..text import console, safe_text
from .progress import Watcher

# where each tracker writes, below `tracking/`; by default the working directory, and trackio a cache
_FOLDERS = {
    "TENSORBOARD_LOGGING_DIR": "tensorboard",
    "WANDB_DIR": "",
    "TRACKIO_DIR": "trackio",
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
    """Log the numbers of a row of ``evals.jsonl``, under names that trackers show as ``eval/accuracy``.

    `eval_train_seconds` is the training clock; `eval_seconds` is how long the evaluation took. TRL's own `log` would
    also log and clear the metrics of a step that still runs.
    """
    names = {name: name if name.startswith("eval_") else f"eval_{name}" for name in row if name != "step"}
    names["seconds"] = "eval_train_seconds"
    numbers = {name: row[name] for name in names if isinstance(row[name], (int, float)) and math.isfinite(row[name])}
    logs_next = trainer.control.should_log  # `log` resets it, and this may come before the log of a step
    Trainer.log(trainer, {names[name]: value for name, value in numbers.items()})
    trainer.control.should_log = logs_next


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


def push(trainer: Trainer, folder: Path, name: str) -> None:
    """Push the final policy with transformers' `push_to_hub`. A failure is only a warning: the run is complete.

    Call it on every process.

    Args:
        trainer: its `hub_*` arguments say where to push.
        folder: the final policy.
        name: the repository, if the recipe does not name it.
    """
    args = trainer.args
    args.hub_model_id = args.hub_model_id or "".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-")
    before, args.output_dir = args.output_dir, str(folder)
    try:
        trainer.push_to_hub()
    except Exception as error:  # the network, the hub, its client
        reason = " ".join(str(error).split()) or type(error).__name__
        console(stderr=True).print(f"[yellow]Not pushed to the hub:[/yellow] {safe_text(reason)} The run is complete.")
    finally:
        args.output_dir = before
