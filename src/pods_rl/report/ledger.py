"""The ledger's part of a report: groups of rollouts, sampled evenly over the run, bounded in size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import escape

from ..runs import Run
from ..text import content_text
from .arms import Arm, rollouts_of
from .curves import finite
from .text import encodable, plain
from .turns import Conversation, read_conversation

TEXT_BUDGET = 2_400_000
"""Bytes of HTML that the ledger may take, about; the rest of the page needs a megabyte or so."""

GROUPS_PER_ARM = 16
FILES_PER_ARM = 64  # read to choose the groups from; a long run may hold thousands
TEXT_LIMIT = 2_000
_MARKUP = 340  # bytes of HTML around one rollout
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)


@dataclass(frozen=True)
class Rollout:
    index: int
    reward: float  # NaN: unscored
    parts: tuple[tuple[str, float], ...]
    kept: bool
    advantage: float | None
    tokens: int | None
    text: str
    cut: int  # characters that are not shown
    conversation: Conversation = field(default_factory=Conversation)

    def shortened(self, limit: int) -> Rollout:
        """The same rollout with at most ``limit`` characters of text."""
        cut = self.cut + max(len(self.text) - limit, 0)
        return replace(self, text=self.text[:limit], cut=cut, conversation=self.conversation.shortened(limit))

    @property
    def texts(self) -> list[str]:
        """What the page shows of it."""
        turns = [f"{turn.text}{turn.calls}" for turn in self.conversation.turns]
        return [self.conversation.gist, *turns] if turns else [self.text]


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts, in the order of ``outward``."""

    arm: str
    run: str
    step: int
    group: int
    prompt: str
    answer: str
    rollouts: tuple[Rollout, ...]  # those generated
    most: int | None = None  # n: rollouts that the group may generate
    stopped: str = ""  # what stopped it before n; empty in ledgers without waves

    @property
    def generated(self) -> str:
        """How many rollouts were generated, and of how many if waves stopped the group.

        >>> Group("pods", "seed-1", 1, 0, "", "", (), most=64, stopped="gave up").generated
        '0 generated of 64 (gave up)'
        """
        count = len(self.rollouts)
        if not self.stopped or self.most is None or count >= self.most:
            return str(count)
        return f"{count} generated of {self.most} ({self.stopped})"

    @property
    def kept(self) -> int:
        return sum(rollout.kept for rollout in self.rollouts)

    @property
    def gist(self) -> str:
        """The end of the prompt on one line: which holds the question, after common instructions."""
        line = plain(self.prompt, limit=TEXT_LIMIT)
        return line if len(line) <= 90 else "…" + line[-89:]

    def spread(self, *, kept_only: bool) -> tuple[float, float]:
        """Mean and standard deviation (ddof = 1) of the rewards; NaN if there are too few."""
        rewards = [r.reward for r in self.rollouts if (r.kept or not kept_only) and not math.isnan(r.reward)]
        mean = float(np.mean(rewards)) if rewards else math.nan
        return mean, float(np.std(rewards, ddof=1)) if len(rewards) > 1 else math.nan

    @property
    def bars(self) -> list[tuple[int, bool]]:
        """Height in percent and kept or not, for the bar of each rollout; equal rewards are half height."""
        rewards = [rollout.reward for rollout in self.rollouts if not math.isnan(rollout.reward)]
        low, high = min(rewards, default=0.0), max(rewards, default=0.0)

        def height(reward: float) -> int:
            if math.isnan(reward):
                return 0
            return round(12 + 88 * (reward - low) / (high - low)) if high > low else 50

        return [(height(rollout.reward), rollout.kept) for rollout in self.rollouts]

    def shortened(self, limit: int) -> Group:
        """The same group, its rollouts cut to ``limit`` characters."""
        return replace(self, rollouts=tuple(rollout.shortened(limit) for rollout in self.rollouts))

    @property
    def size(self) -> int:
        """The approximate size in bytes of HTML."""
        texts = [self.prompt, *(text for rollout in self.rollouts for text in rollout.texts)]
        return _MARKUP * len(texts) + sum(len(escape(text).encode()) for text in texts)


@dataclass(frozen=True)
class Page:
    groups: tuple[Group, ...] = ()
    total: int = 0  # groups in the files that were read
    unreadable: tuple[str, ...] = ()  # names of files that could not be read
    files: int = 0
    files_read: int = 0

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs, ``seed-10`` after ``seed-9``."""

        def place(name: str) -> tuple[int, str]:
            digits = re.search(r"\d+", name)
            return (int(digits[0]) if digits else -1), name

        return tuple(dict.fromkeys(sorted((group.run for group in self.groups), key=place)))


def ledger_page(arms: Sequence[Arm], *, groups_per_arm: int = GROUPS_PER_ARM, budget: int = TEXT_BUDGET) -> Page:
    """Return groups of every arm, evenly over its steps and runs, as many as fit the budget of bytes.

    A file that cannot be read (torn, or of other columns) is skipped and named. Long texts are cut at
    ``TEXT_LIMIT`` characters, shorter if one group alone would exceed the budget.
    """
    logged = [(arm, files) for arm in arms if (files := _files(arm.runs))]
    shown: list[Group] = []
    unreadable: list[str] = []
    total = 0
    for arm, files in logged:
        entries = list(_index(evenly(files, FILES_PER_ARM), unreadable))
        total += len(entries)
        groups = [_read_group(arm, run, path, g, unreadable) for run, path, g in evenly(entries, groups_per_arm)]
        shown += _fit([group for group in groups if group], budget // len(logged))
    dropping = {group.arm for group in shown if group.kept < len(group.rollouts)}
    shown.sort(key=lambda group: group.arm not in dropping)  # an arm that trains on all rollouts comes last
    count = sum(len(files) for _, files in logged)
    read = sum(min(len(files), FILES_PER_ARM) for _, files in logged)
    return Page(tuple(shown), total, tuple(dict.fromkeys(unreadable)), count, read)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` items spread over a sequence, first and last included; all of them if there are no more.

    >>> evenly([0, 1, 2, 3, 4, 5, 6], 3), evenly([1, 2], 5), evenly([1, 2], 1)
    ([0, 3, 6], [1, 2], [1])
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def _fit(groups: list[Group], budget: int) -> list[Group]:
    """Fewer groups, still evenly spread, until they fit; the texts of a last single group are cut instead."""
    while len(groups) > 1 and (size := sum(group.size for group in groups)) > budget:
        groups = evenly(groups, max(1, min(len(groups) - 1, int(len(groups) * budget / size))))
    limit = TEXT_LIMIT
    while len(groups) == 1 and groups[0].size > budget and limit > 60:
        limit //= 2
        groups = [groups[0].shortened(limit)]
    return groups


def _files(runs: Sequence[Run]) -> list[tuple[Run, Path]]:
    """Every file, by step; within a step the runs are shuffled, so that an even choice mixes the runs."""
    files = [(index, run, path) for index, run in enumerate(runs) for path in run.rollout_files()]
    files.sort(key=lambda file: (file[2].name, sha256(f"{file[2].name} {file[0]}".encode()).digest()))
    return [(run, path) for _, run, path in files]


def _index(files: Iterable[tuple[Run, Path]], unreadable: list[str]) -> Iterable[tuple[Run, Path, int]]:
    """(run, file, group) of every group; reads one column a file."""
    for run, path in files:
        try:
            groups = sorted({int(group) for group in pq.read_table(path, columns=["group"])["group"].to_pylist()})
        except _UNREADABLE:
            unreadable.append(_place(run, path))
            continue
        yield from ((run, path, group) for group in groups)


def _place(run: Run, path: Path) -> str:
    return plain(f"{run.path.name}/{path.name}")


def _read_group(arm: Arm, run: Run, path: Path, group_id: int, unreadable: list[str]) -> Group | None:
    try:
        rows = pq.read_table(path, filters=[("group", "==", group_id)]).to_pylist()
        rollouts = outward(_rollout(row, index) for index, row in enumerate(rows))
        prompt = encodable(message_text(rows[0].get("prompt"))[:TEXT_LIMIT])
        answer = encodable(message_text(rows[0].get("answer"))[:200])
        step = int(rows[0]["step"])
        stopped = plain(rows[0].get("stopped") or "", limit=40)
    except _UNREADABLE:
        unreadable.append(_place(run, path))
        return None
    most, _ = rollouts_of(arm.config)
    return Group(arm.name, plain(run.path.name), step, group_id, prompt, answer, tuple(rollouts), most, stopped)


def outward(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Sort by reward, highest first, those without one last.

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
    text = message_text(row.get("completion"))
    index, reward, tokens = (finite(row.get(key)) for key in ("rollout", "reward", "completion_tokens"))
    parts = [
        (plain(key.removeprefix("reward/")), value)
        for key, raw in row.items()
        if key.startswith("reward/") and (value := finite(raw)) is not None
    ]
    return Rollout(
        index=position if index is None else int(index),
        reward=math.nan if reward is None else reward,
        parts=tuple(parts),
        kept=bool(row.get("selected")),
        advantage=finite(row.get("advantage")),
        tokens=None if tokens is None else int(tokens),
        text=encodable(text[:TEXT_LIMIT]),
        cut=max(len(text) - TEXT_LIMIT, 0),
        conversation=read_conversation(row.get("messages"), row.get("turn_rewards")),
    )


def message_text(value: Any) -> str:
    """Return a prompt or completion as text: itself, or a chat's messages with their roles.

    >>> message_text([{"role": "user", "content": "1+1"}])
    'user: 1+1'
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(
            f"{m.get('role', '')}: {content_text(m.get('content'))}" if isinstance(m, dict) else str(m) for m in value
        )
    return encodable(value)
