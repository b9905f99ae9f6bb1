"""What a person sees of a run while it trains: a live line on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..text import console, plain_text

_PHASE = "pods/seconds/"


class Progress:
    """Shows steps and evaluations as they come.

    On a terminal the current step stands on one line that is redrawn; elsewhere a line is printed every
    `every` seconds, so that a log stays short.

    Args:
        label: what the run is called, such as `pods seed 0`.
        max_seconds: the budget of training clock, if there is one.
        max_steps: the budget of steps, if there is one.
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
        self._label = label
        self._max_seconds = max_seconds
        self._max_steps = max_steps
        self._every = every
        self._out = out or console()
        self._printed = -every
        self._accuracy: float | None = None
        redraws = self._out.is_terminal and not self._out.is_dumb_terminal
        self._live = Live(console=self._out, refresh_per_second=8, transient=True) if redraws else None

    def __enter__(self) -> Progress:
        self._context: AbstractContextManager[Any] = self._live or nullcontext()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def say(self, message: str) -> None:
        """One plain line; what the message holds of a user's or a model's is made harmless."""
        self._out.print(_line_of(message))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """An evaluation: always a line of its own."""
        self._accuracy = row["accuracy"]
        self.say(
            f"{self._label:<18} {row['seconds']:6.0f} s  step {row['step']:>5}  "
            f"accuracy {row['accuracy']:.3f}  format {row['format_accuracy']:.3f}"
        )

    def step(self, row: Mapping[str, Any]) -> None:
        """A training step."""
        line = self._line(row)
        if self._live and self._out.is_terminal:  # not once the terminal is gone
            self._live.update(_line_of(line, overflow="ellipsis", no_wrap=True))
        elif time.monotonic() - self._printed >= self._every:
            self._printed = time.monotonic()
            self._out.print(_line_of(line))

    def _line(self, row: Mapping[str, Any]) -> str:
        phases = "/".join(f"{value or 0.0:.2f}" for key, value in row.items() if key.startswith(_PHASE))
        reward = row.get("reward")
        parts = [
            f"{self._label:<18} {row['seconds']:6.0f} s  step {row['step']:>5}",
            f"reward {reward:.2f}" if reward is not None else "reward -",
            f"gen/rew/sel/upd {phases} s",
        ]
        left = self._left(row)
        if left is not None:
            parts.append(f"{left:.0f} s left")
        return "  ".join(parts)

    def _left(self, row: Mapping[str, Any]) -> float | None:
        """Seconds of training clock left, by whichever budget ends first."""
        ends = []
        if self._max_seconds:
            ends.append(self._max_seconds - row["seconds"])
        if self._max_steps and row["step"]:
            ends.append(row["seconds"] / row["step"] * (self._max_steps - row["step"]))
        return max(0.0, min(ends)) if ends else None


def _line_of(line: str, **how: Any) -> Text:
    return Text(plain_text(line), **how)
