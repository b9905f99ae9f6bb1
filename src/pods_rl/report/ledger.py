"""A page of the ledger: groups of rollouts, sampled evenly over the run, bounded in size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import escape

from ..runs import Run
from .arms import Arm
from .curves import finite
from .text import encodable, plain

TEXT_BUDGET = 2_400_000
"""Bytes of HTML that the ledger may take, about; the rest of the page needs a megabyte or so."""

GROUPS_PER_ARM = 16
FILES_PER_ARM = 64  # read to choose the groups from; a long run may hold thousands
TEXT_LIMIT = 2_000
_MARKUP = 340  # bytes of HTML around one rollout


@dataclass(frozen=True)
class Rollout:
    index: int
    reward: float  # NaN: nobody could score it
    parts: tuple[tuple[str, float], ...]
    kept: bool
    advantage: float | None
    tokens: int | None
    text: str
    cut: int  # characters left out


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts, highest reward first; of equal rewards the kept lie outward."""

    arm: str
    run: str
    step: int
    group: int
    prompt: str
    answer: str
    rollouts: tuple[Rollout, ...]

    @property
    def kept(self) -> int:
        return sum(rollout.kept for rollout in self.rollouts)

    @property
    def gist(self) -> str:
        """The end of the prompt on one line: where the question is, after instructions common to all."""
        line = plain(self.prompt, limit=TEXT_LIMIT)
        return line if len(line) <= 90 else "…" + line[-89:]

    def spread(self, *, kept_only: bool) -> tuple[float, float]:
        """Mean and standard deviation (ddof = 1) of the rewards; NaN where there are too few."""
        rewards = [r.reward for r in self.rollouts if (r.kept or not kept_only) and not math.isnan(r.reward)]
        mean = float(np.mean(rewards)) if rewards else math.nan
        return mean, float(np.std(rewards, ddof=1)) if len(rewards) > 1 else math.nan


@dataclass(frozen=True)
class Page:
    groups: tuple[Group, ...]
    total: int  # groups in the files that were read
    unreadable: tuple[str, ...]  # names of files that could not be read
    files: int = 0
    files_read: int = 0

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(sorted((group.run for group in self.groups), key=_by_number)))


def ledger_page(arms: Sequence[Arm], *, groups_per_arm: int = GROUPS_PER_ARM, budget: int = TEXT_BUDGET) -> Page:
    """Groups of every arm, evenly over its steps and runs, until the budget of bytes is spent.

    A file that cannot be read (torn, or of other columns) is named, not fatal. Long texts are cut at
    ``TEXT_LIMIT`` characters, shorter where one group alone would break the budget.
    """
    logged = [(arm, files) for arm in arms if (files := _files(arm.runs))]
    shown: list[Group] = []
    unreadable: list[str] = []
    total = 0
    for arm, files in logged:
        entries = list(_index(arm.runs, evenly(files, FILES_PER_ARM), unreadable))
        total += len(entries)
        groups = [_read_group(arm, run, path, g, unreadable) for run, path, g in evenly(entries, groups_per_arm)]
        shown += fit([group for group in groups if group], budget // len(logged))
    dropping = {group.arm for group in shown if group.kept < len(group.rollouts)}
    shown.sort(key=lambda group: group.arm not in dropping)  # an arm that trains on all it generates comes last
    count = sum(len(files) for _, files in logged)
    read = sum(min(len(files), FILES_PER_ARM) for _, files in logged)
    return Page(tuple(shown), total, tuple(dict.fromkeys(unreadable)), count, read)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """``count`` items spread over a sequence, first and last included; all of them where there are no more.

    >>> evenly([0, 1, 2, 3, 4, 5, 6], 3), evenly([1, 2], 5), evenly([1, 2], 1)
    ([0, 3, 6], [1, 2], [1])
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def fit(groups: list[Group], budget: int) -> list[Group]:
    """Fewer groups, still evenly spread, until they fit; the texts of a last single group are cut instead."""
    while len(groups) > 1 and (size := sum(map(_size, groups))) > budget:
        groups = evenly(groups, max(1, min(len(groups) - 1, int(len(groups) * budget / size))))
    limit = TEXT_LIMIT
    while len(groups) == 1 and _size(groups[0]) > budget and limit > 60:
        limit //= 2
        shorter = tuple(_shorten(rollout, limit) for rollout in groups[0].rollouts)
        groups = [replace(groups[0], rollouts=shorter)]
    return groups


def _size(group: Group) -> int:
    texts = [group.prompt, *(rollout.text for rollout in group.rollouts)]
    return _MARKUP * len(texts) + sum(len(escape(text).encode()) for text in texts)


def _shorten(rollout: Rollout, limit: int) -> Rollout:
    left_out = max(len(rollout.text) - limit, 0)
    return replace(rollout, text=rollout.text[:limit], cut=rollout.cut + left_out)


_UNREADABLE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)


def _files(runs: Sequence[Run]) -> list[tuple[int, Path]]:
    """(run, file), by step; within a step the runs are shuffled, so that no even choice keeps to one run."""
    files = [(index, path) for index, run in enumerate(runs) for path in run.rollout_files()]
    return sorted(files, key=lambda entry: (entry[1].name, sha256(f"{entry[1].name} {entry[0]}".encode()).digest()))


def _index(
    runs: Sequence[Run], files: Iterable[tuple[int, Path]], unreadable: list[str]
) -> Iterable[tuple[Run, Path, int]]:
    """(run, file, group) of every group; reads one column a file."""
    for run_index, path in files:
        run = runs[run_index]
        try:
            groups = sorted({int(group) for group in pq.read_table(path, columns=["group"])["group"].to_pylist()})
        except _UNREADABLE:
            unreadable.append(_place(run, path))
            continue
        for group in groups:
            yield run, path, group


def _place(run: Run, path: Path) -> str:
    return plain(f"{run.path.name}/{path.name}")


def _read_group(arm: Arm, run: Run, path: Path, group_id: int, unreadable: list[str]) -> Group | None:
    try:
        rows = pq.read_table(path, filters=[("group", "==", group_id)]).to_pylist()
        rollouts = outward([_rollout(row, index) for index, row in enumerate(rows)])
        prompt, _ = _clip(message_text(rows[0].get("prompt")), TEXT_LIMIT)
        answer, _ = _clip(message_text(rows[0].get("answer")), 200)
        step = int(rows[0]["step"])
    except _UNREADABLE:
        unreadable.append(_place(run, path))
        return None
    return Group(arm.name, plain(run.path.name), step, group_id, prompt, answer, tuple(rollouts))


def _by_number(name: str) -> tuple[int, str]:
    """``seed-10`` after ``seed-9``."""
    digits = re.search(r"\d+", name)
    return (int(digits[0]) if digits else -1), name


def outward(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Highest reward first, those without one last.

    Of equal rewards the kept come first above the group's mean and last below it, so that a choice of extremes
    (Lemma 3.1) looks like one; then in the order of generation.
    """
    rollouts = list(rollouts)
    scored = [r.reward for r in rollouts if not math.isnan(r.reward)]
    mean = float(np.mean(scored)) if scored else 0.0

    def place(r: Rollout) -> tuple[bool, float, bool, int]:
        if math.isnan(r.reward):
            return True, 0.0, r.kept, r.index
        return False, -r.reward, r.kept if r.reward < mean else not r.kept, r.index

    return sorted(rollouts, key=place)


def _rollout(row: dict[str, Any], position: int) -> Rollout:
    text, cut = _clip(message_text(row.get("completion")), TEXT_LIMIT)
    parts = [
        (plain(key.removeprefix("reward/")), value)
        for key, raw in row.items()
        if key.startswith("reward/") and (value := finite(raw)) is not None
    ]
    tokens = finite(row.get("completion_tokens"))
    reward = finite(row.get("reward"))
    index = finite(row.get("rollout"))
    return Rollout(
        index=position if index is None else int(index),
        reward=math.nan if reward is None else reward,
        parts=tuple(parts),
        kept=bool(row.get("selected")),
        advantage=finite(row.get("advantage")),
        tokens=None if tokens is None else int(tokens),
        text=text,
        cut=cut,
    )


def message_text(value: Any) -> str:
    """A prompt or completion as text: itself, or a chat's messages with their roles.

    >>> message_text([{"role": "user", "content": "1+1"}])
    'user: 1+1'
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(
            f"{m.get('role', '')}: {m.get('content', '')}" if isinstance(m, dict) else str(m) for m in value
        )
    return encodable(value)


def _clip(text: str, limit: int) -> tuple[str, int]:
    return encodable(text[:limit]), max(len(text) - limit, 0)
