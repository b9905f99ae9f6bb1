"""Write the run directory while TRL trains, keep the training clock, and report the run to trackers and the hub."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..distributed.processes import alone, gather
from ..engines.trl.compat import replacing
from ..errors import Interrupted, UserError
from ..evaluation import Evaluation
from ..runs import Record
from ..runs.files import TRACKING
from ..runs.identity import keep_state, kept_state
from ..text import console, safe_text
from .context import Context
from .display import Watcher

if TYPE_CHECKING:
    from .trainer import RunTrainer

_EVALUATION = "eval_prompts"  # only in the log of an evaluation


class Recorder(TrainerCallback):
    """Writes metrics, evaluations and the ledger. Stops the run at the end of its budget, or after a signal.

    Evaluation, the ledger, saving and the order of an epoch's prompts are off the training clock. The policy is
    evaluated at the start, when the clock passes a multiple of `eval_seconds` (`due` is that multiple) and at the end.
    Several processes evaluate together: the first one's clock decides for all. A stop saves a checkpoint. An evaluation
    that a stop interrupts is not recorded, and a resumed run begins with it.

    A resumed run continues the clocks, the draws and the due times of its checkpoint. Records of later steps are
    removed, also the last evaluation of an interrupted run.

    Args:
        context: of the run. Its recipe has the budget and the periods.
        trainer: says which clock counts and how the update computes the policy, and logs evaluations to trackers.
        environment: the content of `environment.json` when training begins.
        evaluate: called with the evaluation's index. If None, the policy is never evaluated.
        ledger: the columns of the latest generation, of all processes; called on each of them.
    """

    def __init__(
        self,
        context: Context,
        trainer: RunTrainer,
        environment: Mapping[str, Any],
        *,
        evaluate: Callable[[int], Evaluation] | None,
        ledger: Callable[[], dict[str, list[Any]] | None],
    ) -> None:
        self.stop_reason: str | None = None
        self.stopped_by: str | None = None
        self.saved_step: int | None = None
        self._context = context
        self._writer = context.writer
        self._shown = context.shown
        self._stop = context.stop
        self._trainer = trainer
        self._environment = environment
        self._evaluate = evaluate
        self._ledger = ledger
        settings = context.recipe.run_settings()
        self._max_seconds: float | None = settings["max_seconds"]
        self._eval_seconds: float | None = settings["eval_seconds"]
        self._save_seconds: float | None = settings["save_seconds"]
        self._record = Record(context.writer, clock=trainer.args.clock, rollouts_every=settings["ledger_every"])
        self._begun = False  # whether the evaluation at the start is over, after which a stop saves a checkpoint
        self._paths: dict[str, str] = {}  # as environment.json has them
        self._ledger_watcher = Watcher("the ledger of rollouts")
        self._tables = Watcher("a file of rollouts or completions", raises=(OSError, UserError))

    @property
    def step(self) -> int:
        """The steps made."""
        return self._record.step

    @property
    def seconds(self) -> float:
        """The training clock at the last step."""
        return self._record.seconds

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved_step = state.global_step
        self._shown.expect_steps(state.max_steps)
        self._context.begin()
        if self._writer and self._trainer.args.report_to:
            # not earlier, since a resume that is refused changes nothing; without it wandb uses a temporary folder
            (self._context.output / TRACKING).mkdir(exist_ok=True)
        self._record.begin(self._environment, step=state.global_step, saved=kept_state(state.stateful_callbacks))
        self.stop_reason = self._budget_spent()
        if self.stop_reason:
            control.should_training_stop = True
        else:
            due = self.seconds // self._eval_seconds * self._eval_seconds if self._eval_seconds else 0.0
            last_due = max((evaluated_due for _, evaluated_due in self._record.evaluated), default=-1.0)
            if due > last_due:  # at the start of a run, or after a stop interrupted this evaluation
                self._run_evaluation(due)
        self._begun = True

    # The order of an epoch's prompts, which takes seconds for a million of them, is not on the clock.

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._record.drop_clock()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._record.start_clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._writer:
            self._writer.check()
        before = self.seconds
        self._record.step = state.global_step
        # The time is the first process's. A signal may reach one process of several.
        self._record.stop_clock()
        of_processes = gather([(self.seconds, self._stop.reason)])
        self._record.seconds = of_processes[0][0]
        reasons = [reason for _, reason in of_processes if reason]
        self.stopped_by = reasons[0] if reasons else None
        # How the policy generates and is updated, which its first passes decide.
        trainer = self._trainer
        known = {
            "attention": trainer.attention, "generation": trainer.generation, "token_budget": trainer.token_budget,
        }  # fmt: skip
        paths = {name: path for name, path in known.items() if path is not None}
        if self._writer and paths != self._paths:
            self._writer.add_to_environment(paths)
            self._paths = paths
        if self._record.wants_rollouts():
            columns = self._ledger_watcher.attempt(self._ledger)  # it raises on all processes or on none
            if self._writer and columns is not None:
                self._tables.attempt(self._writer.write_rollouts, self.step, columns)
        if not self.stopped_by and not self._budget_spent() and self._passed(self._eval_seconds, before):
            assert self._eval_seconds
            self._run_evaluation(due=self.seconds // self._eval_seconds * self._eval_seconds)
        self.stop_reason = self.stopped_by or self._budget_spent()
        if self.stop_reason:
            control.should_training_stop = True
        # Not an ExportableState: transformers would build a new recorder from it, without a run directory.
        keep_state(state.stateful_callbacks, self._record.state())
        if self.stopped_by or self._passed(self._save_seconds, before):
            control.should_save = True
        if not control.should_save:  # else `on_save` restarts the clock
            self._record.start_clock()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved_step = self.step
        self._record.start_clock()

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
        if logs is None or _EVALUATION in logs:
            return
        row = self._record.write_step(logs)
        if row is None:
            return
        # metrics.jsonl has every row; TRL's own list would grow in memory and in every checkpoint.
        del state.log_history[:-1]
        logs |= {name: row[name] for name in ("seconds", "elapsed")}  # the trackers, which come next, get them too
        self._shown.step(row)
        if self._stop.reason and not self.stopped_by and alone():  # the signal came after the step: start no new one
            self.stopped_by = self._stop.reason
            self.stop_reason = self._stop.reason
            control.should_training_stop = True
            control.should_save = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        evaluated_steps = [step for step, _due in self._record.evaluated]
        if self.stopped_by or self.step in evaluated_steps[-1:]:
            return
        due = self.seconds
        if self._max_seconds and self._budget_spent():
            due = float(self._max_seconds)
        elif self._eval_seconds:  # the next multiple, so that runs align
            due = math.ceil(self.seconds / self._eval_seconds) * self._eval_seconds
        try:
            self._run_evaluation(due)
        except Exception:
            # All steps are done, and the final policy is not saved yet: a resume makes it from this checkpoint. Several
            # processes save together, and the others may be waiting in the evaluation.
            if alone() and self.saved_step != self.step:
                self._trainer._save_checkpoint(self._trainer.model, None)
            raise

    def write_status(self, state: str, reason: str | None = None) -> None:
        """Write ``status.json`` with the current step and clocks."""
        self._record.write_status(state, reason)

    def _budget_spent(self) -> str | None:
        if self._max_seconds and self.seconds >= self._max_seconds:
            return f"max_seconds {self._max_seconds:g} reached"
        return None

    def _run_evaluation(self, due: float) -> None:
        if self._evaluate is None:
            return
        try:
            # several processes evaluate together: if one left, the others would hang
            with self._stop.at_once() if alone() else nullcontext():
                result = self._evaluate(len(self._record.evaluated))
        except Interrupted as interrupt:
            if not self._begun:
                raise  # no new step to save
            self.stopped_by = str(interrupt)
            return
        row = self._record.write_evaluation(due, result.scores)
        if self._writer and result.answers:
            self._tables.attempt(self._writer.write_evaluation, self.step, result.columns())
        self._trainer.log_evaluation(row)
        self._shown.evaluation(row)
        self.write_status("running")


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


@contextmanager
def trackers_inside(output: Path, report_to: object) -> Iterator[None]:
    """Inside, trackers write their local files to ``tracking/`` of a run, unless the user has set another place.

    trackio does not: it reads its folder when it is imported, and TRL has imported it by then.
    """
    if report_to in (None, "none", []):
        yield
        return
    tracking = (output / TRACKING).absolute()
    variables = {
        "TENSORBOARD_LOGGING_DIR": str(tracking / "tensorboard"),
        "WANDB_DIR": str(tracking),
        "MLFLOW_TRACKING_URI": tracking.as_uri(),
    }
    unset = {name: value for name, value in variables.items() if name not in os.environ}
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
    try:
        with replacing(args, output_dir=str(folder)):  # `push_to_hub` pushes this folder
            trainer.push_to_hub()
    except Exception as error:  # the network, the hub, its client
        reason = " ".join(str(error).split()) or type(error).__name__
        console(stderr=True).print(f"[yellow]Not pushed to the hub:[/yellow] {safe_text(reason)} The run is complete.")
