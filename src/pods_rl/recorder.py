"""Keeps the training clock and writes the run directory while TRL trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from .evaluation import Evaluation
from .evaluation.processes import agree
from .progress import Progress
from .runs import RunWriter

_NOT_A_STEP = "train_runtime"  # in TRL's closing summary only


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
    """Writes metrics, evaluations and the ledger; stops the run when its budget is spent.

    Evaluation and the ledger are outside the training clock. Evaluations come at the start, when the clock passes a
    multiple of `eval_seconds` (`due` names it) and at the end. Several processes evaluate together, so the first one's
    clock decides for all of them when.

    Args:
        writer: None on the processes that do not write.
        evaluate: called with the evaluation's index; None: never evaluate.
        ledger: the columns of the latest generation, of all processes; called on every one of them.
        stop_requested: asked after each step; a reason, or None to go on.
        eval_completions: keep the completions of each evaluation.
        save_seconds: have TRL save a checkpoint whenever the clock passes a multiple of it, off the clock.
    """

    def __init__(
        self,
        writer: RunWriter | None,
        progress: Progress | None,
        *,
        evaluate: Callable[[int], Evaluation] | None,
        ledger: Callable[[], dict[str, list[Any]] | None],
        stop_requested: Callable[[], str | None],
        max_seconds: float | None = None,
        eval_seconds: float | None = None,
        eval_completions: bool = False,
        ledger_every: int = 0,
        save_seconds: float | None = None,
        clock_offset: float = 0.0,
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._evaluate = evaluate
        self._ledger = ledger
        self._stop_requested = stop_requested
        self._max_seconds = max_seconds
        self._eval_seconds = eval_seconds
        self._eval_completions = eval_completions
        self._ledger_every = ledger_every
        self._save_seconds = save_seconds
        self._saving = False
        self.clock = TrainingClock(clock_offset)
        self.started = time.perf_counter()
        self.seconds = clock_offset
        self.step = 0
        self.stop_reason: str | None = None
        self._evaluations = 0
        self._last_evaluated: int | None = None

    def elapsed(self) -> float:
        """Wall seconds since this recorder was made."""
        return time.perf_counter() - self.started

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.step = state.global_step
        self.seconds = agree(self.seconds)
        if self.seconds == 0.0:
            self._run_evaluation(due=0.0)
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        before, self.step = self.seconds, state.global_step
        self.seconds, asked = agree((self.clock.seconds(), self._stop_requested()))
        with self.clock.paused():
            self._write_ledger()
            self.stop_reason = asked or self._budget_spent()
            if self.stop_reason:
                control.should_training_stop = True
            elif self._passed(self._eval_seconds, before):
                assert self._eval_seconds
                self._run_evaluation(due=self.seconds // self._eval_seconds * self._eval_seconds)
        if self._passed(self._save_seconds, before):
            control.should_save = True
            self._saving = True
            self.clock.pause()

    def on_save(self, *_: Any, **__: Any) -> None:
        if self._saving:
            self._saving = False
            self.clock.resume()

    def _passed(self, period: float | None, before: float) -> bool:
        """Whether the clock passed a multiple of `period` in the last step."""
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

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._last_evaluated != self.step:
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
        result = self._evaluate(self._evaluations)
        self._evaluations += 1
        self._last_evaluated = self.step
        row = {"step": self.step, "due": due, "seconds": self.seconds, "elapsed": self.elapsed(), **result.row()}
        if self._writer:
            self._writer.append_eval(row)
            if self._eval_completions and result.answers:
                self._writer.write_evaluation(self.step, result.columns())
        if self._progress:
            self._progress.evaluation(row)
        self.write_status("running")

    def _write_ledger(self) -> None:
        if self._ledger_every and (self.step == 1 or self.step % self._ledger_every == 0):
            columns = self._ledger()
            if self._writer and columns is not None:
                self._writer.write_rollouts(self.step, columns)
