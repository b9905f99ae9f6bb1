"""The record of a training, for `pods train` and for scripts: its clocks, and the lines that it appends to files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from . import speed
from .files import STATUS, finite_number
from .identity import check_token
from .run import RunWriter


class Record:
    """The record of a training: its training clock, its evaluations, and the lines that its run directory gets.

    A checkpoint holds `state`. `begin` with this state continues the clocks, and removes what the run wrote after the
    checkpoint.

    Args:
        writer: of the run directory. If None, as on all processes but the first, the record keeps the clocks only.
        clock: what the training clock counts: wall, or cpu (processor time of this process).
        rollouts_every: steps between those whose rollouts are written, from step 1 on. If 0, none are written.
    """

    def __init__(self, writer: RunWriter | None, *, clock: str = "wall", rollouts_every: int = 0) -> None:
        self.writer = writer
        self.step = 0
        self.seconds = 0.0  # the training clock at the last step
        self.evaluated: list[tuple[int, float]] = []  # step and `due` of each line of evals.jsonl
        self._token = ""
        self._now = time.process_time if clock == "cpu" else time.perf_counter
        self._rollouts_every = rollouts_every
        self._began = time.perf_counter()
        self._clock_since: float | None = None  # when the training clock was last started; None while it is stopped

    def begin(self, environment: Mapping[str, Any], *, step: int, saved: Mapping[str, Any]) -> None:
        """Begin after a step, with an environment; what the directory holds of later steps is removed.

        Args:
            environment: the content of `environment.json`.
            step: the steps made before.
            saved: the `state` that the checkpoint holds; empty at the first step.
        """
        token = str(saved.get("token") or "") if step else ""
        if self.writer:
            check_token(self.writer.path, step, token)  # before records are removed
            # a run that begins in a new directory with the checkpoint of another one gets a token of its own
            is_begun = (self.writer.path / STATUS).exists()
            self._token = self.writer.write_environment(environment, token if is_begun else "")
        self.step = step
        self.seconds = finite_number(saved.get("seconds"))
        self._began -= finite_number(saved.get("elapsed"))
        self.evaluated = [(evaluated_step, due) for evaluated_step, due in saved.get("evaluated") or ()]
        if self.writer:
            self.writer.rewind(step, len(self.evaluated))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint after this step must hold, as plain data."""
        return {"token": self._token, "step": self.step, **self.clocks(), "evaluated": self.evaluated}

    # -- clocks --------------------------------------------------------------------------------------------------------

    def clocks(self) -> dict[str, float]:
        """Return the training clock at the last step, and the wall clock, which includes the run before a resume."""
        return {"seconds": self.seconds, "elapsed": time.perf_counter() - self._began}

    def start_clock(self) -> None:
        """Let the training clock run, from now if it is stopped."""
        if self._clock_since is None:
            self._clock_since = self._now()

    def stop_clock(self) -> None:
        """Stop the training clock, and add the time since it was started."""
        if self._clock_since is not None:
            self.seconds += self._now() - self._clock_since
            self._clock_since = None

    def drop_clock(self) -> None:
        """Stop the training clock without the time since it was started."""
        self._clock_since = None

    # -- lines ---------------------------------------------------------------------------------------------------------

    def write_step(self, logs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Write the metrics of a step; return the line, or None for what transformers logs at the end."""
        if "train_runtime" in logs:  # only in the log with which transformers ends
            return None
        row = {"step": self.step, **self.clocks(), **logs}
        if self.writer:
            self.writer.append_metrics(row)
        return row

    def write_evaluation(self, due: float, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Write the scores of an evaluation (docs/metrics.md) that was due at a training clock; return the line."""
        self.evaluated.append((self.step, due))
        check = {speed.FIELD: speed.fixed_work(self._now)}
        row = {"step": self.step, "due": due, **self.clocks(), **scores, **check}
        if self.writer:
            self.writer.append_eval(row)
        return row

    def wants_rollouts(self) -> bool:
        """Return whether the rollouts of this step are written."""
        return self._rollouts_every > 0 and (self.step == 1 or self.step % self._rollouts_every == 0)

    def write_status(self, state: str, reason: str | None = None) -> None:
        """Write `status.json` with the step and the clocks."""
        if self.writer:
            self.writer.write_status(state, reason=reason, step=self.step, **self.clocks())
