"""What a command shows while it works: lines that a terminal redraws, plain lines in a log file."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn
from rich.table import Column
from rich.text import Text

from ..distributed import get_rank
from ..runs.progress import share_done
from ..text import console, counted, plain_text, safe_text

_PHASE = "pods/seconds/"
_PHASE_NAMES = {"rollout": "rollouts", "reward": "rewards", "selection": "selection", "update": "update"}
_RECENT = 3600.0  # seconds from which rich estimates the time left; a step may take minutes
_SILENT = 30.0  # seconds without a line, after which a log says what is still in progress
_LONGEST_SILENCE = 60.0  # seconds between such lines, once the work takes long
_LOG_WIDTH = 80
_BAR_WIDTH = 14


class LiveLine(rich.progress.Progress):
    """What a command does now, on lines that a terminal redraws; in a log, on lines that are printed now and then.

    A log is never silent for long: what is in progress is printed again, with the time that it has taken.

    Args:
        out: the console.
        every: seconds between lines of progress in a log.
        silent: seconds after which a log without a new line says what is in progress.
    """

    def __init__(self, out: Console, *, every: float = 10.0, silent: float = _SILENT) -> None:
        spinner = SpinnerColumn("line" if out.options.ascii_only else "dots")
        wrapped = Column(overflow="fold")  # nothing is cut if the terminal is narrow
        text = TextColumn("{task.description}", markup=False, table_column=wrapped)
        super().__init__(
            spinner, text, console=out, refresh_per_second=4, transient=True, speed_estimate_period=_RECENT
        )
        self._row = self.add_task("", total=1.0)
        self._every = every
        self._silent = silent
        self._printed_at: float | None = None  # when a log got its last line of progress
        self._doing = ""  # what is in progress, as a log says it
        self._doing_since = time.monotonic()
        self._heard_at = time.monotonic()  # when a log got its last line of any kind
        self._over = Event()
        self._watching: Thread | None = None
        self._writing = RLock()  # a line may come from `_watch_silence`

    @property
    def redraws(self) -> bool:
        """Whether the output is a terminal that can redraw lines; False as soon as the terminal is gone."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def start(self) -> None:
        if self.redraws:
            super().start()
        elif not self.console.quiet:
            self._watching = Thread(target=self._watch_silence, daemon=True)
            self._watching.start()

    def stop(self) -> None:
        self._over.set()
        if self._watching is not None:
            self._watching.join()
        if self.live.is_started:
            super().stop()

    def begin(self, what: str, *, in_log: bool = True) -> None:
        """Show what begins. A log shows it at once, or without `in_log` only if it takes longer than `silent`."""
        self.work_on(what)
        if self.redraws:
            self.show(what)
        elif in_log:
            self.say(what)

    def work_on(self, what: str) -> None:
        """Set what a log prints, with its duration, if no other line comes for a while."""
        self._doing = what
        self._doing_since = time.monotonic()

    def show(self, text: str) -> None:
        """Show how far the work is; text may have several lines."""
        if self.redraws:
            self.update(self._row, description=plain_text(text), refresh=True)
            return
        now = time.monotonic()
        if self._printed_at is None or now - self._printed_at >= self._every:
            self._printed_at = now
            self.say(text)

    def say(self, text: str) -> None:
        """Print text that stays; what users and models wrote in it is escaped."""
        with self._writing:
            self._heard_at = time.monotonic()
            self.console.print(Text(plain_text(text)))

    def note(self, text: str) -> None:
        """Print sentences that stay, of which a terminal breaks no word."""
        with self._writing:
            self._heard_at = time.monotonic()
            self.console.print(Text(plain_text(text)), soft_wrap=not self.console.is_terminal)

    def _watch_silence(self) -> None:
        """Print what is in progress when a log got no line for `silent` seconds, then ever less often."""
        patience = self._silent
        said_of = self._doing_since
        while not self._over.wait(min(1.0, self._silent)):
            now = time.monotonic()
            if self._doing_since != said_of:
                said_of = self._doing_since
                patience = self._silent
            if not self._doing or now - self._heard_at < patience:
                continue
            patience = max(self._silent, min(2 * patience, _LONGEST_SILENCE))
            try:
                self.say(f"{self._doing}, {in_units(now - self._doing_since)} so far")
            except (OSError, ValueError):  # the output is gone; the work itself finds out
                return

    def left(self, done: float) -> str:
        """Return the time left, which rich estimates from the share that is done; empty while it is unknown."""
        self.update(self._row, completed=done)
        seconds = self.tasks[0].time_remaining
        return "" if seconds is None else f"{in_units(seconds)} left"

    def bar(self, share: float) -> str:
        """Return a bar of a share from 0 to 1, with its percentage."""
        full, empty = "#." if self.console.options.ascii_only else "━┄"
        filled = int(_BAR_WIDTH * share)
        return f"{full * filled}{empty * (_BAR_WIDTH - filled)} {percentage(share)}"


class RunDisplay(LiveLine):
    """Shows what a run does and how far it is, and each evaluation on a line of its own.

    Args:
        label: the run's name in each line of a log, such as `pods seed-1`.
        max_seconds: the budget of training clock. If None, there is no limit.
        max_steps: the budget of steps. If None or -1, there is no limit.
        every: seconds between lines of progress in a log.
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
        self._max_steps = max_steps if max_steps and max_steps > 0 else None
        self._trains = False

    def begin(self, what: str, *, in_log: bool = True) -> None:
        """Show what begins: loading, an evaluation. A log shows it at once, until the run makes its first step."""
        super().begin(f"{self._label}: {what}", in_log=in_log and not self._trains)

    def show_part(self, doing: str) -> None:
        """Show the progress of an evaluation."""
        self.show(f"{self._label}: {doing}")

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Print an evaluation."""
        place = self._of_all(f"step {row['step']:>5}")
        self.say(f"{self._label:<18} {row['seconds']:6.0f} s  {place}  {scores_of(row)}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a training step: how far the run is, the mean reward, and what a step spends its seconds on."""
        self._trains = True
        self.work_on(f"{self._label}: step {row['step'] + 1}")
        share = share_done(row["step"], row["seconds"], self._max_steps, self._max_seconds)
        has_budget = not math.isnan(share)
        facts = [self._of_all(f"step {row['step']}")]
        time_left = self.left(share) if has_budget else ""
        if time_left:
            facts.append(time_left)
        if row.get("reward") is not None:
            facts.append(f"reward {row['reward']:.3g}")
        if self.redraws:
            line = ", ".join(facts)
            if has_budget:
                line = f"{self.bar(share)}  {line}"
            self.show(f"{line}\n{seconds_of_step(row)}".rstrip())
            return
        # In a log: plain lines of a fixed width, without a bar.
        if has_budget:
            facts.insert(0, percentage(share))
        lines = textwrap.wrap(f"{self._label}: {', '.join(facts)}", _LOG_WIDTH, subsequent_indent="  ")
        if seconds_of_step(row):
            lines.append(f"  {seconds_of_step(row)}")
        self.show("\n".join(lines))

    def expect_steps(self, steps: int) -> None:
        """Take the number of steps that the trainer plans, if the recipe sets epochs and no other budget."""
        if self._max_steps is None and self._max_seconds is None:
            self._max_steps = steps

    def _of_all(self, place: str) -> str:
        """Return the place of a step among all steps, if their number is known."""
        return place if self._max_steps is None else f"{place} of {self._max_steps}"


class EvaluationDisplay(LiveLine):
    """Shows what `pods eval` does and how far it is.

    Args:
        shows: whether anything is shown. Of several processes only one shows it.
    """

    def __init__(self, *, shows: bool = True) -> None:
        out = progress_console()
        out.quiet = not shows
        super().__init__(out)

    def completed(self, completions: int, total: int) -> None:
        """Show how many completions of all are done."""
        if completions >= total:
            self.begin("grading the completions")
            return
        share = completions / total
        text = f"{completions} of {total} completions"
        time_left = self.left(share)
        if time_left:
            text += f", {time_left}"
        if self.redraws:
            self.show(f"{self.bar(share)}  {text}")
        else:
            self.show(f"{percentage(share)}, {text}")


def progress_console() -> Console:
    """Return a console for progress next to results: standard error, or standard output if only that is a terminal."""
    on_output = sys.stdout.isatty() and not sys.stderr.isatty()
    return console(stderr=not on_output)


def seconds_of_step(row: Mapping[str, Any]) -> str:
    """Return the seconds of a step and what they were spent on, in words; empty if they are unknown.

    >>> seconds_of_step({"pods/seconds/rollout": 0.2, "pods/seconds/selection": 0.0001, "pods/seconds/update": 0.05})
    '0.25 s per step: 80 % rollouts, 20 % update'
    """
    seconds = {name: row.get(f"{_PHASE}{phase}") or 0.0 for phase, name in _PHASE_NAMES.items()}
    total = sum(seconds.values())
    if total <= 0:
        return ""
    parts = []
    for name, part in seconds.items():
        rounded = round(100 * part / total)
        if rounded > 0:
            parts.append(f"{rounded} % {name}")
    return f"{total:.3g} s per step: {', '.join(parts)}"


def percentage(share: float) -> str:
    """Return a share as text; only the end of the work is 100 %.

    >>> percentage(0.345), percentage(0.9999), percentage(1.2)
    ('34 %', '99 %', '100 %')
    """
    whole = int(100 * min(share, 1.0) + 1e-9)  # 29 of 100 steps, as a float, is just below 29 %
    return f"{whole} %"


def in_units(seconds: float) -> str:
    """Return a time in at most two units.

    >>> in_units(5), in_units(80), in_units(7500), in_units(200_000)
    ('5 s', '1 min 20 s', '2 h 5 min', '2 d 7 h')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    if hours:
        return f"{hours} h {minute} min"
    if minutes:
        return f"{minutes} min {second} s"
    return f"{second} s"


def run_label(output: Path) -> str:
    """Return the name of a run in each line that it prints; a run of an experiment has its arm's name too.

    >>> run_label(Path("runs/mine")), run_label(Path("runs/quickstart/pods/seed-1"))
    ('mine', 'pods seed-1')
    """
    path = output.resolve()
    return f"{path.parent.name} {path.name}" if path.name.startswith("seed-") else path.name


def scores_of(row: Mapping[str, Any]) -> str:
    """Return the scores of an evaluation to show: accuracy and form, or the rewards if no answer is graded.

    >>> scores_of({"accuracy": 0.5, "format_accuracy": 1.0})
    'accuracy 50.0 %  format 100.0 %'
    >>> scores_of({"reward": 0.25, "reward_se": 0.1, "reward/judge:brevity": 0.25})
    'reward 0.250'
    >>> scores_of({"reward": 0.3, "reward/judge:brevity": 0.2, "reward/format": 1.0, "reward/format_se": 0.1})
    'reward 0.300  judge:brevity 0.200  format 1.000'
    """
    if "accuracy" in row:
        return f"accuracy {_percent(row['accuracy'])}  format {_percent(row.get('format_accuracy'))}"
    names = [name for name in row if name.startswith("reward/") and not name.endswith("_se")]
    parts = [f"{name.removeprefix('reward/')} {_decimal(row[name])}" for name in names]
    total = f"reward {_decimal(row.get('reward'))}"
    if len(parts) == 1:  # one reward alone is the sum
        return total
    return "  ".join([total, *parts])


def result_of(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return what a run reached: the score of its first and of its last evaluation.

    >>> result_of([{"step": 0, "accuracy": 0.168, "prompts": 256}, {"step": 17, "accuracy": 0.281, "prompts": 256}])
    'accuracy 16.8 % to 28.1 % on 256 prompts, step 0 to 17'
    >>> result_of([{"step": 0, "reward": 0.25, "prompts": 8}])
    'reward 0.250 on 8 prompts, step 0'
    """
    name = "accuracy" if "accuracy" in evaluations[-1] else "reward"
    shown_rows = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
    write = _percent if name == "accuracy" else _decimal
    scores = [write(row.get(name)) for row in shown_rows]
    steps = " to ".join(str(row.get("step")) for row in shown_rows)
    return f"{name} {' to '.join(scores)} on {counted(evaluations[-1].get('prompts', 0), 'prompt')}, step {steps}"


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "-"


def _decimal(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


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
