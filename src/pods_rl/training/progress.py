"""Progress displays: rows that a terminal redraws, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn, SpinnerColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from ..text import console, plain_text

_PHASE = "pods/seconds/"
_GAP = "  "
_SHORTEST_BAR, _LONGEST_BAR = 6, 40  # columns


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
    from rich, which would need two samples and ignores the time before the first. `spins`: redraw four times a second.
    """

    def __init__(
        self, out: Console, *cells: ProgressColumn, header: bool = False, transient: bool = False, spins: bool = False
    ) -> None:
        self._header = header
        self.footer: list[str] = []
        super().__init__(*cells, console=out, auto_refresh=spins, refresh_per_second=4, transient=transient)

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
        spins: show a spinner, for work that reports little.
        line: what a terminal shows; None: the line itself.
    """

    def __init__(
        self,
        out: Console,
        *,
        every: float,
        first: float = 0.0,
        spins: bool = False,
        line: ProgressColumn | None = None,
    ) -> None:
        cells = [SpinnerColumn("line" if out.options.ascii_only else "dots")] if spins else []
        super().__init__(out, *cells, line or Cell("line"), transient=True, spins=spins)
        self._row = self.add_task("")
        self._every, self._due = every, time.monotonic() + first

    def show(self, line: str) -> None:
        if self.redraws:
            self.update(self._row, line=line, refresh=True)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self.say(line)

    def begin(self, what: str) -> None:
        """Show what begins; in a log at once."""
        if self.redraws:
            self.show(what)
        else:
            self.say(what)

    def say(self, line: str) -> None:
        """Print a line that stays; text of users and models in it is escaped."""
        self.console.print(Text(plain_text(line)))


class _Steps(ProgressColumn):
    """How far a run is, or what it does: on a second line what does not fit on the first, the rest is left out."""

    def __init__(self, out: Console, max_seconds: float | None, max_steps: int | None) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._out, self._max_seconds, self._max_steps = out, max_seconds, max_steps
        self.doing = "starting"
        self.row: Mapping[str, Any] | None = None
        self.accuracy: float | None = None

    def render(self, task: Task) -> Text:
        """Return one or two lines, each shorter than the terminal is wide."""
        if self.row is None:
            return Text(plain_text(self.doing or "training: the first step"))
        (done, share), width = self._done(self.row), self._out.width - 2  # less the spinner
        barred = share is not None and len(done) + len(_GAP) + _SHORTEST_BAR <= width
        rows = _flow([done, *[" " * _SHORTEST_BAR] * barred, *self._rest(self.row)], width)
        if barred:
            spare = width - len(_GAP.join(rows[0]))
            bar = ProgressBar(1.0, share or 0.0, width=min(_SHORTEST_BAR + spare, _LONGEST_BAR))
            drawn = [(part.text, part.style or "") for part in self._out.render(bar) if part.text != "\n"]
            first = Text(_GAP).join([Text(done), Text.assemble(*drawn), *map(Text, rows[0][2:])])
        else:
            first = Text(_GAP.join(rows[0]))
        return Text("\n").join([first, *(Text(_GAP.join(row)) for row in rows[1:])])

    def _done(self, row: Mapping[str, Any]) -> tuple[str, float | None]:
        """Return the step of all steps, or the seconds of the budget that ends first, and the share that is done."""
        step, seconds = row["step"], row["seconds"]
        of_steps = step / self._max_steps if self._max_steps else 0.0
        of_seconds = seconds / self._max_seconds if self._max_seconds else 0.0
        if self._max_seconds and of_seconds >= of_steps:
            return f"step {step}, {seconds:.0f} of {self._max_seconds:.0f} s", min(of_seconds, 1.0)
        if self._max_steps:
            return f"step {step} of {self._max_steps}", min(of_steps, 1.0)
        return f"step {step}", None

    def _rest(self, row: Mapping[str, Any]) -> list[str]:
        left = seconds_left(row["seconds"], row["step"], self._max_seconds, self._max_steps)
        parts = [] if left is None else [f"{duration(left)} left"]
        if self.doing:
            return [*parts, plain_text(self.doing)]
        parts += [reward(row)] + ([] if self.accuracy is None else [f"accuracy {self.accuracy:.3f}"])
        return [*parts, phases(row)]


def _flow(parts: list[str], width: int) -> list[list[str]]:
    """Return the parts in one or two rows of at most `width` columns; without the last ones if they do not fit.

    >>> _flow(["one", "two", "three", "four"], 8)
    [['one', 'two'], ['three']]
    """
    rows: list[list[str]] = [[]]
    for part in parts:
        if rows[-1] and len(_GAP.join([*rows[-1], part])) > width:
            if len(rows) == 2:
                break
            rows.append([])
        rows[-1].append(part)
    return rows


class Progress:
    """Shows what a run does and its steps on a `LiveLine`, and each evaluation on a line of its own.

    Args:
        label: the run's name in each line of a log, such as `pods seed-1`.
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
        out = out or console()
        self._steps = _Steps(out, max_seconds, max_steps)
        self._line = LiveLine(out, every=every, spins=True, line=self._steps)

    def __enter__(self) -> Progress:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()

    def say(self, message: str) -> None:
        """Print a plain line; text of users and models in it is escaped."""
        self._line.say(message)

    def begin(self, what: str) -> None:
        """Show what begins: loading, an evaluation."""
        self._steps.doing = what
        if self._steps.row is None or self._line.redraws:  # in a log its result is enough once the run trains
            self._line.begin(f"{self._label}: {what}")

    def show(self, doing: str) -> None:
        """Show how far that is."""
        self._steps.doing = doing
        self._line.show(f"{self._label}: {doing}")

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Print an evaluation."""
        self._steps.doing, self._steps.accuracy = "", row["accuracy"]
        self.say(f"{self._start(row)}  accuracy {row['accuracy']:.3f}  format {row['format_accuracy']:.3f}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a training step."""
        self._steps.doing, self._steps.row = "", row
        left = seconds_left(row["seconds"], row["step"], self._max_seconds, self._max_steps)
        parts = [self._start(row), reward(row)]
        parts += [] if left is None else [f"{duration(left)} left"]
        self._line.show(_GAP.join([*parts, phases(row)]))

    def _start(self, row: Mapping[str, Any]) -> str:
        return f"{self._label:<18} {row['seconds']:6.0f} s  step {row['step']:>5}"


def label_of(output: Path) -> str:
    """Return the name of a run in each line that it prints; of a run of an experiment with its arm.

    >>> label_of(Path("runs/mine")), label_of(Path("runs/quickstart/pods/seed-1"))
    ('mine', 'pods seed-1')
    """
    path = output.resolve()
    return f"{path.parent.name} {path.name}" if path.name.startswith("seed-") else path.name


def reward(row: Mapping[str, Any]) -> str:
    """Return the mean reward of a step in words."""
    return "reward -" if row.get("reward") is None else f"reward {row['reward']:.2f}"


def phases(row: Mapping[str, Any]) -> str:
    """Return the seconds of a step: generation, rewards, selection, update."""
    seconds = "/".join(f"{value or 0.0:.2f}" for key, value in row.items() if key.startswith(_PHASE))
    return f"gen/rew/sel/upd {seconds} s"


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
