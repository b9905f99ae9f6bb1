"""The display of an experiment: a line for each event and evaluation, and on a terminal a line of what is left."""

from __future__ import annotations

import math
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..experiment import Event, PlannedRun
from ..runs import Run
from ..runs.files import EVALS, finite_number, last_row
from ..runs.progress import Progress, progress_of
from ..text import console
from ..training.display import LiveLine, percentage

_EVERY = 1.0  # seconds between looks at the runs in progress
_LOG_EVERY = 60.0  # seconds between lines on what is left, in a log
_LINE_WIDTH = 78  # next to the spinner


class Board(LiveLine):
    """Show the runs of an experiment; call it with each event of its plan."""

    def __init__(self, plan: Sequence[PlannedRun], *, out: Console | None = None) -> None:
        super().__init__(out or console(), every=_LOG_EVERY)
        self._plan = plan
        self._events: dict[Path, Event] = {}  # the latest of each run
        self._progress: dict[Path, Progress] = {}
        self._evaluated: dict[Path, object] = {}  # the step of the evaluation printed last
        self.failures: list[Event] = []
        self._over = threading.Event()
        self._guard = threading.Lock()  # events come from other threads than `_watch`
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        super().start()
        self._printed_at = time.monotonic()  # the first events are lines of their own
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        super().stop()

    def __call__(self, event: Event) -> None:
        """Show what happened to a run."""
        with self._guard:
            self._events[event.run.path] = event
            if event.kind in ("failed", "stopped"):
                self.failures.append(event)
            self._read(event)
            outcome: str = event.kind
            if event.reason and event.kind == "started":
                outcome = event.reason  # resumes from a checkpoint, or starts again
            elif event.reason:
                outcome += f": {event.reason}"
            self.say(f"[{event.position}/{event.total}] {_label_of_run(event.run)} {outcome}  {event.path}")

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            with self._guard:
                for event in self._events.values():
                    if event.kind == "started":
                        self._read(event)
                self.show(self.summary())

    def _read(self, event: Event) -> None:
        """Read how far a run is, and print a new evaluation. Damaged values count as 0."""
        path = event.run.path
        self._progress[path] = progress_of(Run(event.path), event.run.recipe.values)
        evaluation = last_row(event.path / EVALS)
        if not evaluation or event.kind == "skipped":
            return
        step = evaluation.get("step")
        if path in self._evaluated and self._evaluated[path] == step:  # printed before
            return
        self._evaluated[path] = step
        if "accuracy" not in evaluation and "reward" in evaluation:
            score = f"reward {finite_number(evaluation['reward']):.3f}"
        else:
            score = f"accuracy {100 * finite_number(evaluation.get('accuracy')):.1f} %"
        clock = f"{finite_number(evaluation.get('seconds')):6.0f} s  step {step}"
        self.say(f"{_label_of_run(event.run):<24} {clock}  {score}")

    def summary(self) -> str:
        """Return a line on the runs that have ended and the time left, and the runs in progress with their steps."""
        counts = Counter(event.kind for event in self._events.values())
        ended = len(self._events) - counts["started"]
        done = float(ended)  # a run in progress counts with its share
        run_texts = []
        for event in self._events.values():
            if event.kind != "started":
                continue
            progress = self._progress[event.run.path]
            share = 0.0 if math.isnan(progress.share) else progress.share
            done += share
            text = f"step {progress.step:.0f} ({percentage(share)})" if progress.step > 0 else "loading"
            run_texts.append(f"{_label_of_run(event.run)} {text}")
        share_of_all = done / len(self._plan)
        parts = [f"{ended} of {len(self._plan)} runs done"]
        time_left = self.left(share_of_all)
        if time_left:
            parts.append(time_left)
        for kind in ("failed", "stopped"):
            if counts[kind]:
                parts.append(f"{counts[kind]} {kind}")
        line = ", ".join(parts)
        if self.redraws:
            line = f"{self.bar(share_of_all)}  {line}"
        lines = [line]
        if run_texts:
            lines += textwrap.wrap(f"now: {', '.join(run_texts)}", _LINE_WIDTH, subsequent_indent="     ")
        return "\n".join(lines)


def _label_of_run(run: PlannedRun) -> str:
    return f"{run.arm} seed {run.seed}"
