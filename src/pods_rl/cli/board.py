"""The display of an experiment: a live table on a terminal, plain lines in a log file."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.progress import TaskID
from rich.text import Text

from ..experiment import Event, PlannedRun
from ..experiment.running import Kind
from ..runs import EVALS, METRICS, Run
from ..runs.files import number
from ..text import console, plain_text
from ..training.progress import Cell, LiveRows, duration, seconds_left

_STYLES = {"started": "bold", "skipped": "dim", "finished": "green", "stopped": "yellow", "failed": "red"}
_ORDER = {"started": 0, "waiting": 0, "failed": 1, "stopped": 1, "planned": 2, "finished": 3, "skipped": 4}
_WIDTHS = {"seed": 4, "state": 8, "step": 5, "seconds": 7, "accuracy": 8, "left": 10}
_EVERY = 1.0  # seconds between looks at the runs in progress
_TAIL = 2**16  # bytes: some dozens of lines of metrics


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, 0 if unknown: ``seconds`` of training clock, ``elapsed`` of wall clock since its start.

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
    """Read the progress of a run from the ends of its files, while it trains; damaged values become 0.

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
    """Return the last JSON object of a JSONL file; None if its last 64 KiB hold none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # empty, truncated, or cut at the start of the tail
            continue
        if isinstance(row, dict):
            return row
    return None


@dataclass
class _Row:
    """A run on the board: its row in the table, the latest event, and its progress."""

    run: PlannedRun
    task: TaskID
    kind: Kind | Literal["planned"] = "planned"
    path: Path | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    printed: Any = field(default_factory=object)  # the step of the evaluation printed last

    @property
    def done(self) -> bool:
        return self.kind in ("skipped", "finished", "stopped", "failed")

    @property
    def left(self) -> float | None:
        values = self.run.recipe.values
        return seconds_left(
            self.progress.seconds, self.progress.step, values.get("max_seconds"), values.get("max_steps")
        )

    def cells(self) -> dict[str, Any]:
        found = self.progress
        known = found.step or found.accuracy is not None
        state = {"started": "training" if known else "loading", "waiting": "elsewhere", "skipped": "done before"}
        left = self.left if self.kind in ("started", "waiting") else None
        return {
            "style": _STYLES.get(self.kind, ""),
            "arm": self.run.arm,
            "seed": str(self.run.seed),
            "state": state.get(self.kind, self.kind),
            "step": str(found.step) if known else "",
            "seconds": f"{found.seconds:.0f}" if known else "",
            "accuracy": "" if found.accuracy is None else f"{found.accuracy:.3f}",
            "left": "" if left is None else duration(left),
        }


class Board:
    """Shows the runs of an experiment; call it with each event.

    On a terminal the table is redrawn; elsewhere each start, end and evaluation is a line.

    Args:
        plan: every run, in order.
        parallel: how many runs train at the same time.
    """

    def __init__(self, plan: Sequence[PlannedRun], *, parallel: int = 1, out: Console | None = None) -> None:
        self._out, self._parallel = out or console(), parallel
        self._arm = Cell("arm")
        cells = [Cell(n, justify="left" if n == "state" else "right", min_width=w) for n, w in _WIDTHS.items()]
        self._table = LiveRows(self._out, self._arm, *cells, header=True)
        self._rows = {run.path: _Row(run, self._table.add_task("")) for run in plan}
        self.failures: list[Event] = []
        self._over, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Board:
        self._table.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        self._table.stop()

    def __call__(self, event: Event) -> None:
        """Show what happened to a run."""
        with self._lock:
            row = self._rows[event.run.path]
            row.kind, row.path = event.kind, event.path
            if event.kind in ("failed", "stopped"):
                self.failures.append(event)
            if row.done:
                self._read(row, event.path)
            if not self._table.redraws or event.kind == "failed":
                self._out.print(self._line(event))
            self._look()

    def table(self) -> Group:
        """Return the current table: as many runs as fit, running ones first, and a summary line."""
        self._fill()
        return Group(*self._table.get_renderables())

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        """Read the progress of the running runs, and redraw the table."""
        with self._lock:
            for row in self._rows.values():
                if row.path and not row.done:
                    self._read(row, row.path)
            if self._table.redraws:
                self._fill()
                self._table.refresh()

    def _read(self, row: _Row, path: Path) -> None:
        """Read a run's progress; without a table, print each new evaluation."""
        found = row.progress = run_progress(path)
        evaluation = found.evaluation or {}
        step = evaluation.get("step")
        if found.accuracy is None or step == row.printed or row.kind == "skipped" or self._table.redraws:
            return
        row.printed = step
        label = f"{row.run.arm} seed {row.run.seed}"
        line = f"{label:<24} {number(evaluation.get('seconds')):6.0f} s  step {step}  accuracy {found.accuracy:.3f}"
        self._out.print(Text(plain_text(line)))

    def _fill(self) -> None:
        """Update the table and the lines below it."""
        with self._lock:
            rows = list(self._rows.values())
            ranked = sorted(rows, key=lambda row: _ORDER[row.kind])[: max(3, self._out.height - 5)]
            shown = {row.task for row in ranked}
            for row in rows:
                self._table.update(row.task, visible=row.task in shown, **row.cells())
            names = self._out.width - sum(_WIDTHS.values()) - len(_WIDTHS)  # names are cut, numbers are not
            self._arm.get_table_column().max_width = max(4, names)
            hidden = len(rows) - len(shown)
            self._table.footer = [f"... and {hidden} more runs"] if hidden else []
            self._table.footer.append(self._summary(rows))

    def _summary(self, rows: Sequence[_Row]) -> str:
        counts = Counter(row.kind for row in rows)
        parts = [f"{sum(row.done for row in rows)} of {len(rows)} runs done"]
        parts += [f"{counts[kind]} {kind}" for kind in ("failed", "stopped") if counts[kind]]
        left = [row.left for row in rows if not row.done]
        known = [seconds for seconds in left if seconds is not None]
        if known and len(known) == len(left):
            # wall time per second of training clock so far: loading and evaluating count, too
            seen = [row.progress for row in rows if row.progress.elapsed > row.progress.seconds > 0]
            wall = sum(found.elapsed for found in seen) / sum(found.seconds for found in seen) if seen else 1.0
            parts.append(f"about {duration(sum(known) * wall / self._parallel)} left")
        return ", ".join(parts)

    def _line(self, event: Event) -> Text:
        reason = f": {event.reason}" if event.reason else ""
        label = f"[{event.position}/{event.total}] {event.run.arm} seed {event.run.seed}"
        return Text(plain_text(f"{label} {event.kind}{reason}  {event.path}"), style=_STYLES.get(event.kind, ""))
