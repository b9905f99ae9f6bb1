"""The display of an experiment: a line for each event and evaluation, and on a terminal a line of what is left."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..experiment import Event, PlannedRun
from ..runs import EVALS, METRICS, Run
from ..runs.files import last_row, number
from ..text import console
from ..training.progress import LiveLine, share_done

_EVERY = 1.0  # seconds between looks at the runs in progress
_BUDGETS = ("max_seconds", "max_steps")


class Board(LiveLine):
    """Show the runs of an experiment; call it with each event.

    Args:
        plan: every run, in order.
    """

    def __init__(self, plan: Sequence[PlannedRun], *, out: Console | None = None) -> None:
        super().__init__(out or console())
        self._plan = plan
        self._events: dict[Path, Event] = {}  # the latest of each run
        self._clocks: dict[Path, tuple[float, float]] = {}  # seconds of training clock and steps
        self._evaluated: dict[Path, object] = {}  # the step of the evaluation printed last
        self.failures: list[Event] = []
        self._over, self._guard = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        super().start()
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
            reason = f": {event.reason}" if event.reason else ""
            self.say(f"[{event.position}/{event.total}] {_label(event.run)} {event.kind}{reason}  {event.path}")

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            with self._guard:
                for event in self._events.values():
                    if event.kind == "started":
                        self._read(event)
                if self.redraws:
                    self.show(self.summary())

    def _read(self, event: Event) -> None:
        """Read how far a run is, and print a new evaluation. Damaged values count as 0."""
        place, run = event.run.path, Run(event.path)
        last = max(run.status, last_row(run.path / METRICS), key=lambda row: number(row.get("step")))
        self._clocks[place] = number(last.get("seconds")), number(last.get("step"))
        found = last_row(run.path / EVALS)
        if found and event.kind != "skipped" and self._evaluated.get(place, self) != found.get("step"):
            self._evaluated[place] = found.get("step")
            clock = f"{number(found.get('seconds')):6.0f} s  step {found.get('step')}"
            score = "accuracy" if "accuracy" in found or "reward" not in found else "reward"
            self.say(f"{_label(event.run):<24} {clock}  {score} {number(found.get(score)):.3f}")

    def summary(self) -> str:
        """Return one line: the runs that have ended, the time left, and the runs in progress with their steps."""
        kinds = Counter(event.kind for event in self._events.values())
        ended = len(self._events) - kinds["started"]
        going = [event.run for event in self._events.values() if event.kind == "started"]
        used = sum(share_done(*self._clocks[run.path], *map(run.recipe.values.get, _BUDGETS)) for run in going)
        parts = [f"{ended} of {len(self._plan)} runs done", self.left((ended + used) / len(self._plan))]
        parts += [f"{kinds[kind]} {kind}" for kind in ("failed", "stopped") if kinds[kind]]
        for run in going:
            step = self._clocks[run.path][1]
            parts.append(f"{_label(run)} {f'step {step:.0f}' if step else 'loading'}")
        return ", ".join(filter(None, parts))


def _label(run: PlannedRun) -> str:
    return f"{run.arm} seed {run.seed}"
