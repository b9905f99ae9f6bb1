"""Keeps the training clock and writes the run directory while TRL trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from transformers import TrainerCallback

from ..distributed.signals import Stop
from ..errors import Interrupted
from ..evaluation import Evaluation
from ..evaluation.processes import alone, gather
from ..runs import RunWriter
from .progress import Progress

_NOT_A_STEP = "train_runtime"  # in TRL's closing summary only
_STATE = "pods_recorder"  # our place in the state that a checkpoint holds


class TrainingClock:
    """Seconds of training: wall time without what was spent in `pause`.

    Example:
        >>> now = iter([0.0, 5.0, 8.0, 9.0])
        >>> clock = TrainingClock(now=lambda: next(now)); clock.start()
        >>> with clock.paused(): pass
        >>> clock.seconds()
        6.0
    """

    def __init__(self, offset: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._offset = offset
        self._start: float | None = None
        self._since = 0.0

    def start(self) -> None:
        self._start = self._now()

    def seconds(self) -> float:
        return self._offset if self._start is None else self._offset + self._now() - self._start

    def paused(self) -> TrainingClock:
        return self

    def pause(self) -> None:
        self._since = self._now()

    def resume(self) -> None:
        if self._start is not None:
            self._start += self._now() - self._since

    def __enter__(self) -> None:
        self.pause()

    def __exit__(self, *_: object) -> None:
        self.resume()


class Recorder(TrainerCallback):
    """Writes metrics, evaluations and the ledger; stops the run when its budget is spent, or a signal asks.

    Evaluation, the ledger and saving are outside the training clock. Evaluations come at the start, when the clock
    passes a multiple of `eval_seconds` (`due` names it) and at the end. Several processes evaluate together, so the
    first one's clock decides for all of them when. A stop saves a checkpoint; an evaluation that it interrupts leaves
    no trace, and a resumed run begins with it.

    A resumed run goes on where its checkpoint was made: clocks, the draws of the next evaluation and when it is due.
    What the run directory holds of later is forgotten, also the evaluation with which an interrupted run ended.

    Args:
        writer: None on the processes that do not write.
        evaluate: called with the evaluation's index; None: never evaluate.
        ledger: the columns of the latest generation, of all processes; called on every one of them.
        stop: looked at after each step; meets a signal at once during an evaluation, where one process is alone.
        eval_completions: keep the completions of each evaluation.
        save_seconds: have TRL save a checkpoint whenever the clock passes a multiple of it.
    """

    def __init__(
        self,
        writer: RunWriter | None,
        progress: Progress | None,
        *,
        evaluate: Callable[[int], Evaluation] | None,
        ledger: Callable[[], dict[str, list[Any]] | None],
        stop: Stop,
        max_seconds: float | None = None,
        eval_seconds: float | None = None,
        eval_completions: bool = False,
        ledger_every: int = 0,
        save_seconds: float | None = None,
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._evaluate = evaluate
        self._ledger = ledger
        self._stop = stop
        self._max_seconds = max_seconds
        self._eval_seconds = eval_seconds
        self._eval_completions = eval_completions
        self._ledger_every = ledger_every
        self._save_seconds = save_seconds
        self._saving = False
        self.clock = TrainingClock()
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.step = 0
        self.stop_reason: str | None = None
        self.stopped_by: str | None = None
        self._begun = False
        self.saved_step: int | None = None
        self._evaluated: list[tuple[int, float]] = []  # step and `due` of each

    def elapsed(self) -> float:
        """Wall seconds since this recorder was made, and those of the run before it was resumed."""
        return time.perf_counter() - self.started

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = self.saved_step = state.global_step
        self._restore(state.stateful_callbacks.get(_STATE))
        if self._writer:
            self._writer.rewind(self.step, len(self._evaluated))
        self.stop_reason = self._budget_spent()
        control.should_training_stop |= self.stop_reason is not None
        due = self.seconds // self._eval_seconds * self._eval_seconds if self._eval_seconds else 0.0
        # at the start, or the one that a stop interrupted
        if not self.stop_reason and due > max((before for _, before in self._evaluated), default=-1.0):
            self._run_evaluation(due)
        self._begun = True
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        before, self.step = self.seconds, state.global_step
        heard = gather([(self.clock.seconds(), self._stop.reason)])  # a signal may reach one process of several
        self.seconds, self.stopped_by = heard[0][0], next((reason for _, reason in heard if reason), None)
        with self.clock.paused():
            self._write_ledger()
            if not self.stopped_by and not self._budget_spent() and self._passed(self._eval_seconds, before):
                assert self._eval_seconds
                self._run_evaluation(due=self.seconds // self._eval_seconds * self._eval_seconds)
        self.stop_reason = self.stopped_by or self._budget_spent()
        if self.stop_reason:
            control.should_training_stop = True
        # Not as an ExportableState: transformers would make a new recorder of that, without a run directory.
        state.stateful_callbacks[_STATE] = self._state()
        if self.stopped_by or self._passed(self._save_seconds, before):
            control.should_save = True
        if control.should_save:
            self._pause_to_save()

    def _pause_to_save(self) -> None:
        if not self._saving:
            self._saving = True
            self.clock.pause()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved_step = self.step
        if self._saving:
            self._saving = False
            self.clock.resume()

    def _passed(self, period: float | None, before: float) -> bool:
        """Whether the clock passed a multiple of `period` since it showed `before`."""
        return period is not None and self.seconds // period > before // period

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or _NOT_A_STEP in logs:
            return
        # metrics.jsonl has it all; TRL's own list would grow by it in memory, and in every checkpoint's state.
        del state.log_history[:-1]
        row = {"step": self.step, "seconds": self.seconds, "elapsed": self.elapsed(), **logs}
        if self._writer:
            self._writer.append_metrics(row)
        if self._progress:
            self._progress.step(row)
        if self._stop.reason and not self.stopped_by and alone():  # it came since the step ended: begin no other
            self.stop_reason = self.stopped_by = self._stop.reason
            control.should_training_stop = control.should_save = True
            self._pause_to_save()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if not self.stopped_by and self.step not in [step for step, _ in self._evaluated[-1:]]:
            self._run_evaluation(due=self._due_at_the_end())

    def write_status(self, state: str, reason: str | None = None) -> None:
        """Say how the run stands."""
        if self._writer:
            self._writer.write_status(
                state, reason=reason, step=self.step, seconds=self.seconds, elapsed=self.elapsed()
            )

    def _budget_spent(self) -> str | None:
        if self._max_seconds and self.seconds >= self._max_seconds:
            return f"max_seconds {self._max_seconds:g} reached"
        return None

    def _due_at_the_end(self) -> float:
        """The budget where it was spent; else the next multiple of `eval_seconds`, so that runs can be aligned."""
        if self._max_seconds and self._budget_spent():
            return float(self._max_seconds)
        if self._eval_seconds:
            return math.ceil(self.seconds / self._eval_seconds) * self._eval_seconds
        return self.seconds

    def _run_evaluation(self, due: float) -> None:
        if self._evaluate is None:
            return
        try:
            # several processes answer together: one that left would keep the others waiting
            with self._stop.at_once() if alone() else nullcontext():
                result = self._evaluate(len(self._evaluated))
        except Interrupted as interrupt:
            if not self._begun:
                raise  # there is nothing new to save
            self.stopped_by = str(interrupt)
            return
        self._evaluated.append((self.step, due))
        row = {"step": self.step, "due": due, "seconds": self.seconds, "elapsed": self.elapsed(), **result.row()}
        if self._writer:
            self._writer.append_eval(row)
            if self._eval_completions and result.answers:
                self._writer.write_evaluation(self.step, result.columns())
        if self._progress:
            self._progress.evaluation(row)
        self.write_status("running")

    def _state(self) -> dict[str, Any]:
        """What a checkpoint after this step holds of us."""
        return {"seconds": self.seconds, "elapsed": self.elapsed(), "evaluated": self._evaluated}

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state:
            self.seconds = state["seconds"]
            self.started -= state["elapsed"]
            self._evaluated = [(step, due) for step, due in state["evaluated"]]
            self.clock = TrainingClock(self.seconds)

    def _write_ledger(self) -> None:
        if self._ledger_every and (self.step == 1 or self.step % self._ledger_every == 0):
            columns = self._ledger()
            if self._writer and columns is not None:
                self._writer.write_rollouts(self.step, columns)
