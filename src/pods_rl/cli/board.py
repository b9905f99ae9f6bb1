"""What a person sees of an experiment: a live table on a terminal, plain lines in a log file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..experiment import Event, Planned, Standing, standing
from ..runs.files import number
from ..text import console, plain_text

_LOOKS = {"started": "bold", "skipped": "dim", "finished": "green", "stopped": "yellow", "failed": "red"}
_DONE = ("skipped", "finished", "stopped", "failed")
_COLUMNS = {"seed": 4, "state": 8, "step": 5, "seconds": 7, "accuracy": 8, "left": 10}  # least widths
_OTHERS = sum(_COLUMNS.values()) + len(_COLUMNS)  # what they and the gaps take: the names get the rest
_EVERY = 1.0  # seconds between looks at the runs in progress


class Board:
    """Shows the runs of an experiment as they come; call it with each event.

    On a terminal the table is redrawn; elsewhere each start, end and evaluation is a line.

    Args:
        plan: every run, in the order they are made.
        parallel: runs made side by side.
    """

    def __init__(self, plan: Sequence[Planned], *, parallel: int = 1, out: Console | None = None) -> None:
        self._out = out or console()
        self._plan, self._parallel = list(plan), parallel
        self._events: dict[object, Event] = {}  # by the run's place below the experiment's directory: the latest
        self._last: dict[object, Standing] = {}
        self._told: dict[object, Any] = {}  # the step of the evaluation printed last
        self.failures: list[Event] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        redraws = self._out.is_terminal and not self._out.is_dumb_terminal
        self._live = Live(console=self._out, auto_refresh=False, vertical_overflow="crop") if redraws else None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Board:
        self._context: AbstractContextManager[Any] = self._live or nullcontext()
        self._context.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        self._context.__exit__(*error)

    def __call__(self, event: Event) -> None:
        """Take in what happened to a run."""
        with self._lock:
            self._events[event.run.path] = event
            if event.kind in ("failed", "stopped"):
                self.failures.append(event)
        if event.kind in _DONE:
            self._tell_evaluation(event)
        if self._live is None or event.kind == "failed":
            self._out.print(self._line(event))
        self._look()

    def table(self) -> Group:
        """The table as it stands: as many runs as fit, those in progress first, and a line on all of them."""
        with self._lock:
            events = dict(self._events)
        table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
        table.add_column("arm", no_wrap=True, overflow="ellipsis", max_width=max(4, self._out.width - _OTHERS))
        for name, width in _COLUMNS.items():
            side: Literal["left", "right"] = "left" if name == "state" else "right"
            table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis", min_width=width)
        rows = self._rows(events)
        for run in rows:
            table.add_row(*self._cells(run, events.get(run.path)), style=_LOOKS.get(self._kind(run, events), ""))
        hidden = len(self._plan) - len(rows)
        more = [Text(f"... and {hidden} more runs", style="dim")] if hidden else []
        return Group(table, *more, Text(self._summary(events)))

    def _rows(self, events: dict[object, Event]) -> list[Planned]:
        """Those in progress, then the failed, the waiting and the finished, as many as fit; in the plan's order."""
        order = {"started": 0, "waiting": 0, "failed": 1, "stopped": 1, "planned": 2, "finished": 3, "skipped": 4}
        ranked = sorted(self._plan, key=lambda run: order[self._kind(run, events)])
        chosen = {run.path for run in ranked[: max(3, self._out.height - 5)]}
        return [run for run in self._plan if run.path in chosen]

    def _kind(self, run: Planned, events: dict[object, Event]) -> str:
        event = events.get(run.path)
        return event.kind if event else "planned"

    def _cells(self, run: Planned, event: Event | None) -> list[Text]:
        kind = event.kind if event else "planned"
        found = self._last.get(run.path, Standing("unknown"))
        known = found.step or found.accuracy is not None
        state = {"started": "training" if known else "loading", "waiting": "elsewhere", "skipped": "done before"}
        left = self._left(run, found) if kind in ("started", "waiting") else None
        cells = [
            run.arm,
            str(run.seed),
            state.get(kind, kind),
            str(found.step) if known else "",
            f"{found.seconds:.0f}" if known else "",
            "" if found.accuracy is None else f"{found.accuracy:.3f}",
            "" if left is None else duration(left),
        ]
        return [Text(plain_text(cell)) for cell in cells]

    def _left(self, run: Planned, found: Standing) -> float | None:
        """Seconds of training clock left, by whichever budget ends first."""
        budget, steps = run.recipe.values.get("max_seconds"), run.recipe.values.get("max_steps") or -1
        ends = [budget - found.seconds] if budget else []
        if steps > 0 and found.step:
            ends.append(found.seconds / found.step * (steps - found.step))
        return max(0.0, min(ends)) if ends else None

    def _summary(self, events: dict[object, Event]) -> str:
        counts: Counter[str] = Counter(event.kind for event in events.values())
        done = sum(counts[kind] for kind in _DONE)
        parts = [f"{done} of {len(self._plan)} runs done"]
        parts += [f"{counts[kind]} {kind}" for kind in ("failed", "stopped") if counts[kind]]
        left = [self._left(run, self._last.get(run.path, Standing("unknown"))) for run in self._plan
                if self._kind(run, events) not in _DONE]  # fmt: skip
        if left and None not in left:
            clock = sum(value or 0.0 for value in left) * self._wall_per_second() / self._parallel
            parts.append(f"about {duration(clock)} left")
        return ", ".join(parts)

    def _wall_per_second(self) -> float:
        """Wall time per second of training clock, evaluation and loading included, as seen so far."""
        seen = [found for found in self._last.values() if found.seconds > 0 and found.elapsed > found.seconds]
        seconds = sum(found.seconds for found in seen)
        return sum(found.elapsed for found in seen) / seconds if seconds else 1.0

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        with self._lock:
            seen = list(self._events.values())
        for event in seen:
            if event.kind in ("started", "waiting") or event.run.path not in self._last:
                self._last[event.run.path] = standing(event.path)
                self._tell_evaluation(event)
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def _tell_evaluation(self, event: Event) -> None:
        """Print a run's latest evaluation once, where there is no table."""
        if self._live is not None or event.kind == "skipped":
            return
        found = self._last[event.run.path] = standing(event.path)
        with self._lock:
            row = found.evaluation or {}
            told = event.run.path in self._told and self._told[event.run.path] == row.get("step")
            if found.accuracy is None or told:
                return
            self._told[event.run.path] = row.get("step")
        label = f"{event.run.arm} seed {event.run.seed}"
        self._out.print(
            Text(plain_text(f"{label:<24} {number(row.get('seconds')):6.0f} s  step {row.get('step')}  "
                            f"accuracy {found.accuracy:.3f}"))
        )  # fmt: skip

    def _line(self, event: Event) -> Text:
        reason = f": {event.reason}" if event.reason else ""
        place = f"[{event.position}/{event.total}] {event.run.arm} seed {event.run.seed}"
        return Text(plain_text(f"{place} {event.kind}{reason}  {event.path}"), style=_LOOKS.get(event.kind, ""))


def duration(seconds: float) -> str:
    """A time as a person says it.

    >>> duration(42), duration(600), duration(5400), duration(200000)
    ('42 s', '10 min', '1 h 30 min', '2 d 7 h')
    """
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
