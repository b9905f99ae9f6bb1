"""What a person sees of an experiment: a live table on a terminal, plain lines in a log file."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from ..experiment import Event, PlannedRun
from ..runs import EVALS, METRICS, Run
from ..runs.files import number
from ..text import console, plain_text
from ..training.progress import Cell, LiveRows, duration, seconds_left

_STYLES = {"started": "bold", "skipped": "dim", "finished": "green", "stopped": "yellow", "failed": "red"}
_DONE = ("skipped", "finished", "stopped", "failed")
_ORDER = {"started": 0, "waiting": 0, "failed": 1, "stopped": 1, "planned": 2, "finished": 3, "skipped": 4}
_WIDTHS = {"seed": 4, "state": 8, "step": 5, "seconds": 7, "accuracy": 8, "left": 10}
_EVERY = 1.0  # seconds between looks at the runs in progress
_TAIL = 2**16  # bytes: some dozens of lines of metrics


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, 0 where unknown: ``seconds`` of training clock, ``elapsed`` of wall clock since its start.

    ``evaluation`` is the latest line of ``evals.jsonl``.
    """

    state: str = "unknown"
    step: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    evaluation: dict[str, Any] | None = None

    @property
    def accuracy(self) -> float | None:
        found = (self.evaluation or {}).get("accuracy")
        return number(found) if number(found, math.nan) == found else None


def run_progress(path: Path) -> RunProgress:
    """Read how far a run is from the ends of its files, while it trains; whatever is damaged counts as 0.

    >>> run_progress(Path("nowhere"))
    RunProgress(state='unknown', step=0, seconds=0.0, elapsed=0.0, evaluation=None)
    """
    status = Run(path).status
    row = max(status, _last_row(path / METRICS) or {}, key=lambda row: number(row.get("step")))
    return RunProgress(
        state=str(status.get("state", "unknown")),
        step=int(number(row.get("step"))),
        seconds=number(row.get("seconds")),
        elapsed=number(row.get("elapsed")),
        evaluation=_last_row(path / EVALS),
    )


def _last_row(path: Path) -> dict[str, Any] | None:
    """The last whole line of a JSONL file that holds an object; None where its last 64 KiB have none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # empty, torn, or cut where we began to read
            continue
        if isinstance(row, dict):
            return row
    return None


class Board:
    """Shows the runs of an experiment; call it with each event.

    On a terminal the table is redrawn; elsewhere each start, end and evaluation is a line.

    Args:
        plan: every run, in order.
        parallel: how many runs train at the same time.
    """

    def __init__(self, plan: Sequence[PlannedRun], *, parallel: int = 1, out: Console | None = None) -> None:
        self._out = out or console()
        self._plan, self._parallel = list(plan), parallel
        self._events: dict[Path, Event] = {}  # the latest of each run, by its path below the experiment's directory
        self._progress: dict[Path, RunProgress] = {}
        self._printed: dict[Path, Any] = {}  # the step of the evaluation printed last
        self.failures: list[Event] = []
        self._over, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._arm = Cell("arm")
        cells = [Cell(n, justify="left" if n == "state" else "right", min_width=w) for n, w in _WIDTHS.items()]
        self._rows = LiveRows(self._out, self._arm, *cells, header=True)
        self._tasks = {run.path: self._rows.add_task("") for run in self._plan}

    def __enter__(self) -> Board:
        self._rows.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        self._rows.stop()

    def __call__(self, event: Event) -> None:
        """Show what happened to a run."""
        with self._lock:
            self._events[event.run.path] = event
            if event.kind in ("failed", "stopped"):
                self.failures.append(event)
            if event.kind in _DONE:
                self._read(event)
            if not self._rows.redraws or event.kind == "failed":
                self._out.print(self._line(event))
            self._look()

    def table(self) -> Group:
        """The table as it is now: as many runs as fit, those in progress first, and a line on all of them."""
        self._fill()
        return Group(*self._rows.get_renderables())

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        """Read how far the runs in progress are, and redraw the table."""
        with self._lock:
            for event in self._events.values():
                if event.kind not in _DONE:
                    self._read(event)
            if self._rows.redraws:
                self._fill()
                self._rows.refresh()

    def _read(self, event: Event) -> None:
        """Read how far a run is; where there is no table, print each evaluation once."""
        path = event.run.path
        found = self._progress[path] = run_progress(event.path)
        row = found.evaluation or {}
        step = row.get("step")
        known = path in self._printed and self._printed[path] == step
        if known or found.accuracy is None or event.kind == "skipped" or self._rows.redraws:
            return
        self._printed[path] = step
        label = f"{event.run.arm} seed {event.run.seed}"
        line = f"{label:<24} {number(row.get('seconds')):6.0f} s  step {step}  accuracy {found.accuracy:.3f}"
        self._out.print(Text(plain_text(line)))

    def _fill(self) -> None:
        """Bring the rows and the lines below them up to date."""
        with self._lock:
            kinds = {run.path: self._events[run.path].kind if run.path in self._events else "planned"
                     for run in self._plan}  # fmt: skip
            ranked = sorted(self._plan, key=lambda run: _ORDER[kinds[run.path]])
            shown = {run.path for run in ranked[: max(3, self._out.height - 5)]}
            for run in self._plan:
                kind = kinds[run.path]
                self._rows.update(
                    self._tasks[run.path],
                    visible=run.path in shown,
                    style=_STYLES.get(kind, ""),
                    **self._cells(run, kind),
                )
            names = self._out.width - sum(_WIDTHS.values()) - len(_WIDTHS)  # numbers are not cut, names are
            self._arm.get_table_column().max_width = max(4, names)
            hidden = len(self._plan) - len(shown)
            self._rows.footer = [f"... and {hidden} more runs"] if hidden else []
            self._rows.footer.append(self._summary(list(kinds.values())))

    def _cells(self, run: PlannedRun, kind: str) -> dict[str, Any]:
        found = self._progress.get(run.path, RunProgress())
        known = found.step or found.accuracy is not None
        state = {"started": "training" if known else "loading", "waiting": "elsewhere", "skipped": "done before"}
        left = self._left(run) if kind in ("started", "waiting") else None
        return {
            "arm": run.arm,
            "seed": str(run.seed),
            "state": state.get(kind, kind),
            "step": str(found.step) if known else "",
            "seconds": f"{found.seconds:.0f}" if known else "",
            "accuracy": "" if found.accuracy is None else f"{found.accuracy:.3f}",
            "left": "" if left is None else duration(left),
        }

    def _left(self, run: PlannedRun) -> float | None:
        found, values = self._progress.get(run.path, RunProgress()), run.recipe.values
        return seconds_left(found.seconds, found.step, values.get("max_seconds"), values.get("max_steps"))

    def _summary(self, kinds: Sequence[str]) -> str:
        counts = Counter(kinds)
        parts = [f"{sum(counts[kind] for kind in _DONE)} of {len(kinds)} runs done"]
        parts += [f"{counts[kind]} {kind}" for kind in ("failed", "stopped") if counts[kind]]
        left = [self._left(run) for run, kind in zip(self._plan, kinds, strict=True) if kind not in _DONE]
        known = [seconds for seconds in left if seconds is not None]
        if known and len(known) == len(left):
            parts.append(f"about {duration(sum(known) * self._wall_per_second() / self._parallel)} left")
        return ", ".join(parts)

    def _wall_per_second(self) -> float:
        """Wall time per second of training clock so far: evaluating and loading count, too."""
        seen = [found for found in self._progress.values() if found.elapsed > found.seconds > 0]
        seconds = sum(found.seconds for found in seen)
        return sum(found.elapsed for found in seen) / seconds if seconds else 1.0

    def _line(self, event: Event) -> Text:
        reason = f": {event.reason}" if event.reason else ""
        label = f"[{event.position}/{event.total}] {event.run.arm} seed {event.run.seed}"
        return Text(plain_text(f"{label} {event.kind}{reason}  {event.path}"), style=_STYLES.get(event.kind, ""))
