"""The display of an experiment: a live table on a terminal, plain lines in a log file."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..experiment import Event, PlannedRun
from ..runs import EVALS, METRICS, Run
from ..runs.files import last_row, number
from ..text import console, plain_text
from ..training.progress import duration, seconds_left

_STYLES = {"started": "bold", "skipped": "dim", "finished": "green", "stopped": "yellow", "failed": "red"}
_ORDER = {"started": 0, "failed": 1, "stopped": 1, "planned": 2, "finished": 3, "skipped": 4}
_STATES = {"started": "training", "skipped": "done before"}
_OVER = ("skipped", "finished", "stopped", "failed")
_WIDTHS = {"seed": 4, "state": 8, "step": 5, "seconds": 7, "accuracy": 8, "left": 10}
_EVERY = 1.0  # seconds between looks at the runs in progress


class _Row:
    """A run on the board: its latest event, and what its files say. Damaged values count as 0."""

    def __init__(self, plan: PlannedRun) -> None:
        self.plan, self.kind, self.label = plan, "planned", f"{plan.arm} seed {plan.seed}"
        self.path: Path | None = None  # None until the run starts
        self.step, self.seconds, self.elapsed, self.accuracy = 0, 0.0, 0.0, ""
        self.evaluation: dict[str, Any] = {}
        self.printed: object = object()  # the step of the evaluation printed last

    def read(self) -> None:
        """Read the ends of the run's files, which are short to read while it trains."""
        if self.path:
            last = max(Run(self.path).status, last_row(self.path / METRICS), key=lambda row: number(row.get("step")))
            self.step, self.seconds = int(number(last.get("step"))), number(last.get("seconds"))
            self.elapsed, self.evaluation = number(last.get("elapsed")), last_row(self.path / EVALS)
            accuracy = number(self.evaluation.get("accuracy"), math.nan)
            self.accuracy = "" if math.isnan(accuracy) else f"{accuracy:.3f}"

    @property
    def left(self) -> float | None:
        limits = self.plan.recipe.values
        return seconds_left(self.seconds, self.step, limits.get("max_seconds"), limits.get("max_steps"))

    def cells(self) -> list[str]:
        known = self.step > 0 or self.accuracy != ""
        state = _STATES.get(self.kind, self.kind) if known or self.kind != "started" else "loading"
        left = self.left if self.kind == "started" else None
        clock = (str(self.step), f"{self.seconds:.0f}") if known else ("", "")
        return [str(self.plan.seed), state, *clock, self.accuracy, "" if left is None else duration(left)]


class Board:
    """Show the runs of an experiment; call it with each event.

    On a terminal the table is redrawn; elsewhere each start, end and evaluation is a line.

    Args:
        plan: every run, in order.
        parallel: how many runs train at the same time.
    """

    def __init__(self, plan: Sequence[PlannedRun], *, parallel: int = 1, out: Console | None = None) -> None:
        self._out, self._parallel = out or console(), parallel
        self._rows = {run.path: _Row(run) for run in plan}
        self.failures: list[Event] = []
        self._live = Live(console=self._out, get_renderable=self.table, refresh_per_second=1)
        self._over, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def _redraws(self) -> bool:
        return self._out.is_terminal and not self._out.is_dumb_terminal  # false once the terminal is gone

    def __enter__(self) -> Board:
        if self._redraws:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show what happened to a run."""
        with self._lock:
            row = self._rows[event.run.path]
            row.kind, row.path = event.kind, event.path
            if event.kind in ("failed", "stopped"):
                self.failures.append(event)
            self._read(row)
            if not self._redraws or event.kind == "failed":
                reason = f": {event.reason}" if event.reason else ""
                line = f"[{event.position}/{event.total}] {row.label} {event.kind}{reason}  {event.path}"
                self._out.print(Text(plain_text(line), style=_STYLES.get(event.kind, "")))

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            with self._lock:
                for row in self._rows.values():
                    if row.kind not in _OVER:
                        self._read(row)

    def _read(self, row: _Row) -> None:
        """Read a run's progress; without a table, print a new evaluation."""
        row.read()
        step = row.evaluation.get("step")
        if not row.accuracy or step == row.printed or row.kind == "skipped" or self._redraws:
            return
        row.printed = step
        clock = f"{number(row.evaluation.get('seconds')):6.0f} s  step {step}"
        self._out.print(Text(plain_text(f"{row.label:<24} {clock}  accuracy {row.accuracy}")))

    def table(self) -> Group:
        """Return the current table: as many runs as fit, running ones first, and a summary line."""
        rows = sorted(self._rows.values(), key=lambda row: _ORDER[row.kind])
        shown = rows[: max(3, self._out.height - 5)]
        table = Table("arm", box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold")
        for name, width in _WIDTHS.items():
            justify: Any = "left" if name == "state" else "right"
            table.add_column(name, justify=justify, min_width=width, no_wrap=True)  # rich cuts only the arm's name
        for row in shown:
            arm = Text(plain_text(row.plan.arm), no_wrap=True, overflow="ellipsis")
            table.add_row(arm, *row.cells(), style=_STYLES.get(row.kind, ""))
        more = [Text(f"... and {len(rows) - len(shown)} more runs")] if len(shown) < len(rows) else []
        return Group(table, *more, Text(self._summary(rows)))

    def _summary(self, rows: Sequence[_Row]) -> str:
        counts = Counter(row.kind for row in rows)
        parts = [f"{sum(row.kind in _OVER for row in rows)} of {len(rows)} runs done"]
        parts += [f"{counts[kind]} {kind}" for kind in ("failed", "stopped") if counts[kind]]
        left = [row.left for row in rows if row.kind not in _OVER]
        if left and None not in left:
            # wall time per second of training clock so far includes loading and evaluating
            seen = [row for row in rows if row.elapsed > row.seconds > 0]
            wall = sum(row.elapsed for row in seen) / sum(row.seconds for row in seen) if seen else 1.0
            parts.append(f"about {duration(sum(filter(None, left)) * wall / self._parallel)} left")
        return ", ".join(parts)
