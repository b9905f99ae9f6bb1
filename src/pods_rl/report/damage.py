"""What a damaged run holds that could not be read: each is said, and the rest of the run counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..runs import Run
from ..runs.files import CONFIG, ENVIRONMENT, EVALS, METRICS, STATUS
from .arms import Arm
from .curves import finite
from .text import plain

_NUMBERS = {
    STATUS: ("step", "seconds", "elapsed"),
    CONFIG: ("num_rollouts", "num_generations", "seed"),
    METRICS: ("step", "seconds", "elapsed"),
    EVALS: ("step", "due", "seconds", "elapsed"),
}
_MOST = 5  # files that are named


def damage_note(arms: Sequence[Arm], metrics: Collection[str]) -> str | None:
    """One sentence on every file of the runs with lines or values that were skipped; None where there is none.

    Args:
        arms: whose runs to look at.
        metrics: what else is read of an evaluation.
    """
    found = []
    for arm in arms:
        for run in arm.runs:
            for name, what in _damage(run, metrics):
                found.append(f"{plain(arm.name)}/{plain(run.path.name)}/{name} ({what})")
    if not found:
        return None
    more = f", and {len(found) - _MOST} more files" if len(found) > _MOST else ""
    return f"Skipped what cannot be read: {', '.join(found[:_MOST])}{more}."


def _damage(run: Run, metrics: Collection[str]) -> list[tuple[str, str]]:
    found = []
    for name, values in ((CONFIG, run.config), (STATUS, run.status), (ENVIRONMENT, run.environment)):
        if not values and (run.path / name).is_file():
            found.append((name, "all of it"))
        elif wrong := _wrong([values], _NUMBERS.get(name, ())):
            found.append((name, wrong))
    for name, rows, more in ((METRICS, run.metrics, ()), (EVALS, run.evals, metrics)):
        lines = run.skipped[name]
        parts = [f"{len(lines)} line{'s' * (len(lines) > 1)} from {lines[0]}"] if lines else []
        parts += [wrong] if (wrong := _wrong(rows, (*_NUMBERS[name], *more))) else []
        if parts:
            found.append((name, "; ".join(parts)))
    return found


def _wrong(rows: Sequence[Mapping[str, Any]], keys: Collection[str]) -> str:
    """``step [1], 2 times``: the values that should be numbers and are not, by key; null stands for no value."""
    count: Counter[str] = Counter()
    example: dict[str, object] = {}
    for row in rows:
        for key in keys:
            value = row.get(key)
            if value is not None and finite(value) is None:
                count[key] += 1
                example.setdefault(key, value)
    parts = [f"{key} {plain(repr(example[key]), 20)}, {times} time{'s' * (times > 1)}" for key, times in count.items()]
    return "; ".join(parts)
