"""The progress of a run: a line that a terminal redraws, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TextColumn
from rich.table import Column
from rich.text import Text

from ..distributed import get_rank
from ..text import console, plain_text, safe_text

_PHASE = "pods/seconds/"
_RECENT = 3600.0  # seconds from which rich estimates the time left; a step may take minutes


class LiveLine(RichProgress):
    """One line that a terminal redraws; elsewhere it is printed now and then, so that a log stays short.

    Args:
        every: seconds between lines in a log.
    """

    def __init__(self, out: Console, *, every: float = 10.0) -> None:
        spinner = SpinnerColumn("line" if out.options.ascii_only else "dots")
        one_line = Column(no_wrap=True, overflow="ellipsis")  # truncated if the terminal is too narrow
        text = TextColumn("{task.description}", markup=False, table_column=one_line)
        super().__init__(
            spinner, text, console=out, refresh_per_second=4, transient=True, speed_estimate_period=_RECENT
        )
        self._row = self.add_task("", total=1.0)
        self._every = every
        self._due = 0.0  # when a log gets its next line

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

    def show(self, line: str) -> None:
        if self.redraws:
            self.update(self._row, description=plain_text(line), refresh=True)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line that stays; text of users and models in it is escaped."""
        self.console.print(Text(plain_text(line)))

    def left(self, done: float) -> str:
        """Return the time left, which rich estimates from the share that is done; empty while it is unknown."""
        self.update(self._row, completed=done)
        seconds = self.tasks[0].time_remaining
        if seconds is None:
            return ""
        return f"{timedelta(seconds=int(seconds))} left"


class Progress(LiveLine):
    """Shows what a run does and its steps on one line, and each evaluation on a line of its own.

    Args:
        label: the run's name in each line, such as `pods seed-1`.
        max_seconds: the budget of training clock. If None, there is no limit.
        max_steps: the budget of steps. If None or -1, there is no limit.
        every: seconds between lines in a log.
        out: the console. If None, standard output.
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
        super().__init__(out or console(), every=every)
        self._label = label
        self._max_seconds = max_seconds
        self._max_steps = max_steps
        self._trains = False

    def begin(self, what: str) -> None:
        """Show what begins: loading, an evaluation. A log shows it at once, until the run makes its first step."""
        if self.redraws:
            self.show_part(what)
        elif not self._trains:
            self.say(f"{self._label}: {what}")

    def show_part(self, doing: str) -> None:
        """Show the progress of an evaluation."""
        self.show(f"{self._label}: {doing}")

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Print an evaluation."""
        self.say(f"{self._start(row)}  {scores_of(row)}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a training step, with its mean reward and its seconds; a narrow terminal cuts the last parts."""
        self._trains = True
        parts = [self._start(row)]
        left = self.left(share_done(row["seconds"], row["step"], self._max_seconds, self._max_steps))
        if left:
            parts.append(left)
        reward = "-"
        if row.get("reward") is not None:
            reward = f"{row['reward']:.2f}"
        parts.append(f"reward {reward}")
        phases = [f"{seconds or 0.0:.2f}" for key, seconds in row.items() if key.startswith(_PHASE)]
        parts.append(f"gen/rew/sel/upd {'/'.join(phases)} s")
        self.show("  ".join(parts))

    def _start(self, row: Mapping[str, Any]) -> str:
        line = f"{self._label:<18} {row['seconds']:6.0f} s  step {row['step']:>5}"
        if self._max_steps is not None and self._max_steps > 0:
            line += f" of {self._max_steps}"
        return line


def label_of(output: Path) -> str:
    """Return the name of a run in each line that it prints; a run of an experiment has its arm's name too.

    >>> label_of(Path("runs/mine")), label_of(Path("runs/quickstart/pods/seed-1"))
    ('mine', 'pods seed-1')
    """
    path = output.resolve()
    if path.name.startswith("seed-"):
        return f"{path.parent.name} {path.name}"
    return path.name


def share_done(seconds: float, step: float, max_seconds: float | None, max_steps: int | None) -> float:
    """Return the share that a run has used of the budget that ends first; 0 without a budget.

    >>> share_done(40.0, 10, 100.0, 20), share_done(40.0, 10, None, -1)
    (0.5, 0.0)
    """
    share = 0.0
    if max_seconds is not None and max_seconds > 0:
        share = seconds / max_seconds
    if max_steps is not None and max_steps > 0:
        share = max(share, step / max_steps)
    return share


def scores_of(row: Mapping[str, Any]) -> str:
    """Return the scores of an evaluation to show: accuracy and form, or the rewards if no answer is graded.

    >>> scores_of({"accuracy": 0.5, "format_accuracy": 1.0})
    'accuracy 0.500  format 1.000'
    >>> scores_of({"reward": 0.25, "reward_se": 0.1, "reward/judge:brevity": 0.25})
    'reward 0.250'
    >>> scores_of({"reward": 0.3, "reward/judge:brevity": 0.2, "reward/format": 1.0, "reward/format_se": 0.1})
    'reward 0.300  judge:brevity 0.200  format 1.000'
    """
    if "accuracy" in row:
        return f"accuracy {_number(row['accuracy'])}  format {_number(row.get('format_accuracy'))}"
    parts = []
    for name, score in row.items():
        if name.startswith("reward/") and not name.endswith("_se"):
            parts.append(f"{name.removeprefix('reward/')} {_number(score)}")
    total = f"reward {_number(row.get('reward'))}"
    if len(parts) == 1:  # one reward alone is the sum
        return total
    return "  ".join([total, *parts])


def _number(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:.3f}"
    return "-"


class Watcher:
    """A wrapper that passes method calls to an object that only watches a run, until its first exception.

    >>> class Display:
    ...     def show(self, text): raise OSError("no terminal")
    >>> shown = Watcher("the display", Display())
    >>> shown.show("step 1") is None, shown.dropped
    (True, True)

    Args:
        name: the object's name in the warning.
        target: the object. If None, only `attempt` is used.
        raises: exceptions that end the run.
        on_drop: called when this is dropped.
    """

    def __init__(
        self,
        name: str,
        target: Any = None,
        *,
        raises: tuple[type[Exception], ...] = (),
        on_drop: Callable[[], object] = lambda: None,
    ) -> None:
        self.dropped = False
        self._name = name
        self._target = target
        self._raises = raises
        self._on_drop = on_drop

    def __getattr__(self, name: str) -> Any:
        return partial(self.attempt, getattr(self._target, name))

    def attempt(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns. If it raises, print a warning and return None, now and at every later call."""
        if self.dropped:
            return None
        try:
            return call(*args, **kwargs)
        except self._raises:
            raise
        except Exception as error:
            self.dropped = True
            self._on_drop()
            if get_rank() == 0:
                message = " ".join(str(error).split())[:300]
                reason = safe_text(f"{type(error).__name__}: {message}")
                console(stderr=True).print(
                    f"[yellow]Warning:[/yellow] {safe_text(self._name)} raised {reason}. The run continues without it."
                )
            return None
