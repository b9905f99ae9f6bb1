"""How far a run is, read from the end of its files while it trains."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs import EVALS, METRICS, Run
from ..runs.files import number

_TAIL = 2**16  # bytes: some dozens of lines of metrics


@dataclass(frozen=True)
class Standing:
    """``seconds`` is the training clock, ``elapsed`` the wall clock since the run's start; 0 where nothing is known.

    ``evaluation`` is the latest line of ``evals.jsonl``.
    """

    state: str
    step: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    evaluation: dict[str, Any] | None = None

    @property
    def accuracy(self) -> float | None:
        found = (self.evaluation or {}).get("accuracy")
        return number(found) if number(found, math.nan) == found else None


def standing(path: Path) -> Standing:
    """How far the run in a directory is; state ``unknown`` where there is none yet.

    >>> standing(Path("nowhere"))
    Standing(state='unknown', step=0, seconds=0.0, elapsed=0.0, evaluation=None)
    """
    status, evaluation = Run(path).status, last_row(path / EVALS)
    row = max(status, last_row(path / METRICS) or {}, key=lambda row: number(row.get("step")))
    return Standing(
        state=str(status.get("state", "unknown")),
        step=int(number(row.get("step"))),
        seconds=number(row.get("seconds")),
        elapsed=number(row.get("elapsed")),
        evaluation=evaluation,
    )


def last_row(path: Path) -> dict[str, Any] | None:
    """The last whole line of a JSONL file that holds an object; None where there is none within its last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # empty, torn, or cut by where we began to read
            continue
        if isinstance(row, dict):
            return row
    return None
