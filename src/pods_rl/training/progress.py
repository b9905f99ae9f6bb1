"""Progress displays: rows that a terminal redraws, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from ..text import console, plain_text

_PHASE = "pods/seconds/"


class Cell(ProgressColumn):
    """The field `name` of each row, escaped; truncated if the terminal is too narrow."""

    def __init__(self, name: str, **layout: Any) -> None:
        super().__init__(Column(name, no_wrap=True, overflow="ellipsis", **layout))
        self._name = name

    def render(self, task: Task) -> Text:
        return Text(plain_text(task.fields.get(self._name, "")), style=task.fields.get("style", ""))


class LiveRows(RichProgress):
    """Rows that a terminal redraws in place, with an optional header and lines below them (`footer`).

    Elsewhere it draws nothing: check `redraws` and print lines instead. Time left comes from the run's clocks, not
    from rich, which would need two samples and ignores the time before the first.
    """

    def __init__(self, out: Console, *cells: Cell, header: bool = False, transient: bool = False) -> None:
        self._header = header
        self.footer: list[str] = []
        super().__init__(*cells, console=out, auto_refresh=False, transient=transient)

    @property
    def redraws(self) -> bool:
        """Whether the output is a terminal that can redraw lines; False as soon as the terminal is gone."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def start(self) -> None:
        if self.redraws:
            super().start()

    def stop(self) -> None:
        if self.live.is_started:
            super().stop()

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        table = super().make_tasks_table(tasks)
        table.show_header, table.header_style = self._header, "bold"
        return table

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from map(Text, self.footer)


class LiveLine(LiveRows):
    """One line that a terminal redraws; elsewhere it is printed every `every` seconds, so that a log stays short.

    Args:
        first: seconds before the first line in a log.
    """

    def __init__(self, out: Console, *, every: float, first: float = 0.0) -> None:
        super().__init__(out, Cell("line"), transient=True)
        self._row = self.add_task("")
        self._every, self._due = every, time.monotonic() + first

    def show(self, line: str) -> None:
        if self.redraws:
            self.update(self._row, line=line, refresh=True)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self.console.print(Text(plain_text(line)))


class Progress:
    """Shows the steps of a run on a `LiveLine`, and each evaluation on a line of its own.

    Args:
        label: the run's name in each line, such as `pods seed-1`.
        max_seconds: the budget of training clock, None: no limit.
        max_steps: the budget of steps, None: no limit.
        every: seconds between lines in a log.
    """

    def __init__(
        self,
        label: str,
        *,
        max_seconds: float | None = None,
        max_steps: int | None = None,
        every: float = 10.0,
        out: Console | None = None,
    ) -> None:
        self._label, self._max_seconds, self._max_steps = label, max_seconds, max_steps
        self._line = LiveLine(out or console(), every=every)

    def __enter__(self) -> Progress:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()

    def say(self, message: str) -> None:
        """Print a plain line; text of users and models in it is escaped."""
        self._line.console.print(Text(plain_text(message)))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Print an evaluation."""
        self.say(f"{self._start(row)}  accuracy {row['accuracy']:.3f}  format {row['format_accuracy']:.3f}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a training step."""
        reward, left = row.get("reward"), seconds_left(row["seconds"], row["step"], self._max_seconds, self._max_steps)
        phases = "/".join(f"{value or 0.0:.2f}" for key, value in row.items() if key.startswith(_PHASE))
        parts = [self._start(row), "reward -" if reward is None else f"reward {reward:.2f}"]
        parts += [] if left is None else [f"{duration(left)} left"]
        self._line.show("  ".join([*parts, f"gen/rew/sel/upd {phases} s"]))

    def _start(self, row: Mapping[str, Any]) -> str:
        return f"{self._label:<18} {row['seconds']:6.0f} s  step {row['step']:>5}"


def seconds_left(seconds: float, step: int, max_seconds: float | None, max_steps: int | None) -> float | None:
    """Return the seconds of training clock left until the first budget ends; None if unknown.

    >>> seconds_left(40.0, 10, 100.0, 20), seconds_left(0.0, 0, None, 20)
    (40.0, None)
    """
    ends = [max_seconds - seconds] if max_seconds else []
    if max_steps and max_steps > 0 and step:
        ends.append(seconds / step * (max_steps - step))
    return max(0.0, min(ends)) if ends else None


def duration(seconds: float) -> str:
    """Return a time in words.

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
