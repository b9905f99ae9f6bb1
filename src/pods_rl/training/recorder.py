"""Write the run directory while TRL trains, keep the training clock, and report the run to trackers and the hub."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..distributed.processes import alone, gather
from ..distributed.signals import Stop
from ..errors import Interrupted, UserError
from ..evaluation import Evaluation
from ..runs import RunWriter
from ..runs.files import TRACKING
from ..text import console, safe_text
from .progress import Watcher

_NOT_A_STEP = "train_runtime"  # only in TRL's closing summary
_EVALUATION = "eval_prompts"  # only in the log of an evaluation
_STATE = "pods_recorder"  # the key of our state in the trainer state of a checkpoint
# where each tracker writes, below `tracking/`; by default the working directory, and trackio a cache
_FOLDERS = {
    "TENSORBOARD_LOGGING_DIR": "tensorboard",
    "WANDB_DIR": "",
    "TRACKIO_DIR": "trackio",
}


@dataclass(eq=False)
class Recorder(TrainerCallback):
    """Writes metrics, evaluations and the ledger. Stops the run at the end of its budget, or after a signal.

    Evaluation, the ledger, saving and the order of an epoch's prompts are off the training clock. The policy is
    evaluated at the start, when the clock passes a multiple of `eval_seconds` (`due` is that multiple) and at the end.
    Several processes evaluate together: the first one's clock decides for all. A stop saves a checkpoint. An evaluation
    that a stop interrupts is not recorded, and a resumed run begins with it.

    A resumed run continues the clocks, the draws and the due times of its checkpoint. Records of later steps are
    removed, also the last evaluation of an interrupted run.

    Args:
        writer: None on the processes that do not write.
        progress: the display.
        evaluate: called with the evaluation's index. If None, the policy is never evaluated.
        ledger: the columns of the latest generation, of all processes; called on each of them.
        stop: read after each step. During an evaluation of a single process a signal raises at once.
        max_seconds: the budget of the training clock.
        ledger_every: write the ledger at step 1 and every `ledger_every` steps. If 0, never.
        save_seconds: have TRL save a checkpoint whenever the clock passes a multiple of it.
        cpu_clock: the clock counts processor time of this process.
        track: called with each evaluation's row.
        attention: returns how the update computes the policy, for `environment.json`; None until that is known.
        begin: called when training begins, before any record is removed.
    """

    writer: RunWriter | None
    progress: Watcher
    evaluate: Callable[[int], Evaluation] | None
    ledger: Callable[[], dict[str, list[Any]] | None]
    stop: Stop
    max_seconds: float | None = None
    eval_seconds: float | None = None
    ledger_every: int = 0
    save_seconds: float | None = None
    cpu_clock: bool = False
    track: Callable[[Mapping[str, Any]], None] | None = None
    attention: Callable[[], str | None] | None = None
    begin: Callable[[], None] = lambda: None

    started: float = field(default_factory=lambda: time.perf_counter(), init=False)
    seconds: float = field(default=0.0, init=False)  # the training clock at the last step
    _clock_since: float | None = field(default=None, init=False)  # when it was last started; None while it is paused
    step: int = field(default=0, init=False)
    stop_reason: str | None = field(default=None, init=False)
    stopped_by: str | None = field(default=None, init=False)
    saved_step: int | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    _attention: str | None = field(default=None, init=False)  # as environment.json has it
    _evaluated: list[tuple[int, float]] = field(default_factory=list, init=False)  # step and `due` of each

    def __post_init__(self) -> None:
        self._ledger = Watcher("the ledger of rollouts")
        self._tables = Watcher("a file of rollouts or completions", raises=(OSError, UserError))

    def _now(self) -> float:
        return time.process_time() if self.cpu_clock else time.perf_counter()

    def _clocks(self) -> dict[str, float]:
        """Return the training clock at the last step, and the wall clock, which includes the run before a resume."""
        return {"seconds": self.seconds, "elapsed": time.perf_counter() - self.started}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.step = state.global_step
        self.saved_step = state.global_step
        self.progress.expect_steps(state.max_steps)
        saved = state.stateful_callbacks.get(_STATE)
        if saved:
            self.seconds = saved["seconds"]
            self.started -= saved["elapsed"]
            self._evaluated = [(step, due) for step, due in saved["evaluated"]]
        self.begin()
        if self.writer:
            self.writer.rewind(self.step, len(self._evaluated))
        self.stop_reason = self._budget_spent()
        if self.stop_reason:
            control.should_training_stop = True
        else:
            self._evaluate_before_steps()
        self._begun = True

    def _evaluate_before_steps(self) -> None:
        """Run the evaluation at the start of a run, or the one that a stop interrupted."""
        due = 0.0
        if self.eval_seconds:
            due = self.seconds // self.eval_seconds * self.eval_seconds
        last_due = max((evaluated_due for _, evaluated_due in self._evaluated), default=-1.0)
        if due > last_due:
            self._run_evaluation(due)

    # The order of an epoch's prompts, which takes seconds for a million of them, is not on the clock.

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._clock_since = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._clock_since is None:
            self._clock_since = self._now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.writer:
            self.writer.check()
        before = self.seconds
        self.step = state.global_step
        self._read_clock_and_signals()
        self._write_attention()
        self._write_ledger()
        if not self.stopped_by and not self._budget_spent() and self._passed(self.eval_seconds, before):
            assert self.eval_seconds
            self._run_evaluation(due=self.seconds // self.eval_seconds * self.eval_seconds)
        self.stop_reason = self.stopped_by or self._budget_spent()
        if self.stop_reason:
            control.should_training_stop = True
        # Not an ExportableState: transformers would build a new recorder from it, without a run directory.
        state.stateful_callbacks[_STATE] = self._clocks() | {"evaluated": self._evaluated}
        if self.stopped_by or self._passed(self.save_seconds, before):
            control.should_save = True
        if not control.should_save:  # else `on_save` restarts the clock
            self._clock_since = self._now()

    def _read_clock_and_signals(self) -> None:
        """Pause the clock, and take its time from the first process and a signal from any of them."""
        assert self._clock_since is not None
        seconds = self.seconds + self._now() - self._clock_since
        self._clock_since = None
        self.stopped_by = None
        # a signal may reach one process of several
        of_processes = gather([(seconds, self.stop.reason)])
        self.seconds, _ = of_processes[0]
        for _, reason in of_processes:
            if reason:
                self.stopped_by = reason
                break

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved_step = self.step
        self._clock_since = self._now()

    def _passed(self, period: float | None, before: float) -> bool:
        """Return whether the clock has passed a multiple of `period` since the time `before`."""
        return period is not None and self.seconds // period > before // period

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is None or _NOT_A_STEP in logs or _EVALUATION in logs:
            return
        # metrics.jsonl has every row; TRL's own list would grow in memory and in every checkpoint.
        del state.log_history[:-1]
        logs |= self._clocks()  # the trackers, which come next, get them too
        row = {"step": self.step, **self._clocks(), **logs}
        if self.writer:
            self.writer.append_metrics(row)
        self.progress.step(row)
        if self.stop.reason and not self.stopped_by and alone():  # the signal came after the step: start no new one
            self.stopped_by = self.stop.reason
            self.stop_reason = self.stop.reason
            control.should_training_stop = True
            control.should_save = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        evaluated_steps = [step for step, _due in self._evaluated]
        if not self.stopped_by and self.step not in evaluated_steps[-1:]:
            self._run_evaluation(due=self._due_at_the_end())

    def write_status(self, state: str, reason: str | None = None) -> None:
        """Write ``status.json`` with the current step and clocks."""
        if self.writer:
            self.writer.write_status(state, reason=reason, step=self.step, **self._clocks())

    def _budget_spent(self) -> str | None:
        if self.max_seconds and self.seconds >= self.max_seconds:
            return f"max_seconds {self.max_seconds:g} reached"
        return None

    def _due_at_the_end(self) -> float:
        """Return the budget if it is spent, else the next multiple of `eval_seconds`, so that runs align."""
        if self.max_seconds and self._budget_spent():
            return float(self.max_seconds)
        if self.eval_seconds:
            return math.ceil(self.seconds / self.eval_seconds) * self.eval_seconds
        return self.seconds

    def _run_evaluation(self, due: float) -> None:
        if self.evaluate is None:
            return
        try:
            # several processes evaluate together: if one left, the others would hang
            with self.stop.at_once() if alone() else nullcontext():
                result = self.evaluate(len(self._evaluated))
        except Interrupted as interrupt:
            if not self._begun:
                raise  # no new step to save
            self.stopped_by = str(interrupt)
            return
        self._evaluated.append((self.step, due))
        row = {"step": self.step, "due": due, **self._clocks(), **result.row()}
        if self.writer:
            self.writer.append_eval(row)
            if result.answers:
                self._tables.attempt(self.writer.write_evaluation, self.step, result.columns())
        if self.track:
            self.track(row)
        self.progress.evaluation(row)
        self.write_status("running")

    def _write_attention(self) -> None:
        """Add to `environment.json` how the update computes the policy, which its first pass decides."""
        if self.writer is None or self.attention is None:
            return
        attention = self.attention()
        if attention is not None and attention != self._attention:
            self.writer.add_to_environment({"attention": attention})
            self._attention = attention

    def _write_ledger(self) -> None:
        if self.ledger_every and (self.step == 1 or self.step % self.ledger_every == 0):
            columns = self._ledger.attempt(self.ledger)  # of all processes together: it raises on all or on none
            if self.writer and columns is not None:
                self._tables.attempt(self.writer.write_rollouts, self.step, columns)


def add_trackers(trainer: Trainer, name: str) -> None:
    """Watch the trainer's trackers, which come last: the recorder's last evaluation must reach them before they close.

    Args:
        trainer: its recorder is already added.
        name: what trackers call the run, unless the recipe names it.
    """
    trainer.args.run_name = trainer.args.run_name or name
    trackers = {kind: tracker for tracker, kind in INTEGRATION_TO_CALLBACK.items()}
    callbacks = trainer.callback_handler.callbacks
    watching = [callback for callback in callbacks if isinstance(callback, (*trackers, ProgressCallback))]
    for callback in watching:
        tracker = trackers.get(type(callback))
        forget = partial(_forget, trainer, tracker)
        callbacks.remove(callback)
        callbacks.append(Watcher(tracker or "the progress display", callback, on_drop=forget))


def _forget(trainer: Trainer, tracker: str | None) -> None:
    """Remove a tracker from `report_to`, where TRL looks it up for its own tables."""
    trainer.args.report_to = [name for name in trainer.args.report_to if name != tracker]


def track_evaluation(trainer: Trainer, row: Mapping[str, Any]) -> None:
    """Log the numbers of a row of ``evals.jsonl``, under names that trackers show as ``eval/accuracy``.

    `eval_train_seconds` is the training clock; `eval_seconds` is how long the evaluation took. TRL's own `log` would
    also log and clear the metrics of a step that still runs.
    """
    numbers = {}
    for name, value in row.items():
        if name == "step" or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        if name == "seconds":
            numbers["eval_train_seconds"] = value
        elif name.startswith("eval_"):
            numbers[name] = value
        else:
            numbers[f"eval_{name}"] = value
    logs_next = trainer.control.should_log  # `log` resets it, and this may come before the log of a step
    Trainer.log(trainer, numbers)
    trainer.control.should_log = logs_next


@contextmanager
def trackers_inside(output: Path, report_to: object) -> Iterator[None]:
    """Inside, trackers write their local files to ``tracking/`` of a run, unless the user has set another place."""
    if report_to in (None, "none", []):
        yield
        return
    tracking = (output / TRACKING).absolute()
    variables = {"MLFLOW_TRACKING_URI": tracking.as_uri()}
    for name, folder in _FOLDERS.items():
        variables[name] = str(tracking / folder)
    unset = {name: value for name, value in variables.items() if name not in os.environ}
    tracking.mkdir(exist_ok=True)  # wandb uses the system's temporary folder if it is missing
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
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
    if not args.hub_model_id:
        args.hub_model_id = re.sub("[^0-9A-Za-z]", "-", name).strip("-")
    output_dir = args.output_dir
    args.output_dir = str(folder)  # `push_to_hub` pushes this folder
    try:
        trainer.push_to_hub()
    except Exception as error:  # the network, the hub, its client
        reason = " ".join(str(error).split()) or type(error).__name__
        console(stderr=True).print(f"[yellow]Not pushed to the hub:[/yellow] {safe_text(reason)} The run is complete.")
    finally:
        args.output_dir = output_dir
