"""Trackers of `report_to`: transformers' callbacks, which get evaluations too and cannot end the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any

import transformers
from transformers import ProgressCallback, Trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl.extras.profiling import ProfilingContext

from ..runs.run import logged_evaluation
from .watcher import Watcher


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
    """Log an evaluation. Not by TRL's `log`, which would also log and clear the metrics of a step that still runs."""
    logs_next = trainer.control.should_log  # `log` resets it, and this may come before the log of a step
    Trainer.log(trainer, logged_evaluation(row))
    trainer.control.should_log = logs_next


@contextmanager
def logging_watched(trainer: Trainer) -> Iterator[None]:
    """Inside, what TRL itself sends to trackers cannot end the run: times of its phases, and tables of completions."""
    log, profile = trainer.log, ProfilingContext._log_metrics
    profiler, table = Watcher("TRL's profiler"), Watcher("the table of completions")

    def stop_table() -> None:
        trainer.log_completions = False

    def logged(logs: dict[str, float], *args: Any) -> None:
        try:
            log(logs, *args)
        except Exception as error:
            if not _is_of_table(error):
                raise
            table.drop(error)
            stop_table()

    trainer.log = logged
    ProfilingContext._log_metrics = lambda self, seconds: profiler.attempt(profile, self, seconds)
    try:
        yield
    finally:
        del trainer.log
        ProfilingContext._log_metrics = profile


def _is_of_table(error: Exception) -> bool:
    """Return whether TRL's `log` raised after transformers' `log` returned, in its table of completions."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "log"]
    within = [file.endswith("grpo_trainer.py") for file in files]
    return any(within) and transformers.trainer.__file__ not in files
