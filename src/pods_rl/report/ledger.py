"""The ledger's part of a report: a readable excerpt, every group for the page's script, and counts over all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..runs import Run
from .arms import Arm
from .difficulty import Bin, Tally, reward_ends
from .explorer import Explorer
from .groups import TEXT_LIMIT, Group, Rollout, group_of, outward
from .reasons import Settings
from .text import plain

__all__ = ["DATA_MB", "TEXT_LIMIT", "Group", "Page", "Rollout", "evenly", "ledger_page", "outward"]

DATA_MB = 20.0
"""Megabytes of the page that rollouts may take, about."""

TEXT_BUDGET = 800_000
"""Bytes of HTML that the excerpt may take, about: what a reader without script sees."""

GROUPS_PER_ARM = 8
_TEXTS = frozenset({"completion", "messages", "turn_rewards", "answer"})
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)


@dataclass(frozen=True)
class Page:
    """What the page shows of the ledgers.

    Args:
        groups: the excerpt.
        total: groups in the files that could be read.
        unreadable: names of files that could not be read.
        files: how many there are.
        data: for the script; empty without groups.
        rollouts: that ``data`` has.
        left_out: groups whose rollouts ``data`` does not have.
        limit_mb: of ``data``.
        tallies: counts of each arm over all its groups.
    """

    groups: tuple[Group, ...] = ()
    total: int = 0
    unreadable: tuple[str, ...] = ()
    files: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    rollouts: int = 0
    left_out: int = 0
    limit_mb: float = DATA_MB
    tallies: tuple[Tally, ...] = ()

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs, ``seed-10`` after ``seed-9``."""
        return tuple(dict.fromkeys(sorted((group.run for group in self.groups), key=_run_place)))

    @cached_property
    def reward_ends(self) -> tuple[float, float]:
        return reward_ends(self.tallies)

    def bins(self, tally: Tally) -> list[Bin]:
        """The histogram of an arm's rewards, its ends those of all arms; empty if none is scored."""
        low, high = self.reward_ends
        return tally.bins(low, high) if low <= high else []


def ledger_page(
    arms: Sequence[Arm],
    *,
    groups_per_arm: int = GROUPS_PER_ARM,
    budget: int = TEXT_BUDGET,
    data_mb: float = DATA_MB,
) -> Page:
    """Read every ledger file of the arms once; a torn one, or one of other columns, is skipped and named.

    Args:
        arms: those without a ledger are not shown.
        groups_per_arm: of the excerpt, evenly over an arm's steps and runs.
        budget: bytes of the excerpt. Texts are cut at ``TEXT_LIMIT`` characters, shorter if one group is too large.
        data_mb: megabytes of the data. Where they do not hold all groups, those that are left out are spread evenly.
    """
    logged = [(arm, Settings.of(arm.config), files) for arm in arms if (files := _files(arm.runs))]
    logged.sort(key=lambda found: found[1].n == found[1].m)  # an arm that trains on all rollouts comes last
    explorer = Explorer(int(data_mb * 1e6))
    tallies = [Tally(arm.label) for arm, _, _ in logged]
    entries: list[list[tuple[int, Run, Path, int]]] = [[] for _ in logged]
    unreadable: list[str] = []
    for place, number in _spread([len(files) for _, _, files in logged]):
        arm, settings, files = logged[number]
        run, path = files[place]
        try:
            groups = _read(path, arm.name, plain(run.path.name), settings, texts=not explorer.is_full)
        except _UNREADABLE:
            unreadable.append(_place(run, path))
            continue
        for group in groups:
            explorer.add(group, number)
            tallies[number].add(group)
            entries[number].append((place, run, path, group.group))
    shown: list[Group] = []
    for (arm, settings, _), own in zip(logged, entries, strict=True):
        chosen = evenly(sorted(own, key=lambda entry: (entry[0], entry[3])), groups_per_arm)
        again = (_one(arm, settings, *entry[1:]) for entry in chosen)
        shown += _fit([group for group in again if group], budget // len(logged))
    dropping = {group.arm for group in shown if group.kept < len(group.rollouts)}
    shown.sort(key=lambda group: group.arm not in dropping)
    return Page(
        groups=tuple(shown),
        total=sum(map(len, entries)),
        unreadable=tuple(sorted(unreadable)),
        files=sum(len(files) for _, _, files in logged),
        data=explorer.data([arm.label for arm, _, _ in logged]) if shown else {},
        rollouts=explorer.rollouts,
        left_out=explorer.left_out,
        limit_mb=data_mb,
        tallies=tuple(tally for tally in tallies if tally.groups),
    )


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` items spread over a sequence, first and last included; all of them if there are no more.

    >>> evenly([0, 1, 2, 3, 4, 5, 6], 3), evenly([1, 2], 5), evenly([1, 2], 1)
    ([0, 3, 6], [1, 2], [1])
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def _spread(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(place, arm) of every file, so that any first part of the list is spread over the places of each arm.

    >>> _spread([4, 1])
    [(0, 0), (0, 1), (2, 0), (1, 0), (3, 0)]
    """
    bits = max(counts, default=0).bit_length()

    def turned(place: int) -> int:  # bits in reverse order: van der Corput's sequence
        return int(f"{place:0{bits}b}"[::-1], 2)

    pairs = [(place, arm) for arm, count in enumerate(counts) for place in range(count)]
    return sorted(pairs, key=lambda pair: (turned(pair[0]), pair[1]))


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


def _read(path: Path, arm: str, run: str, settings: Settings, *, texts: bool) -> list[Group]:
    """The groups of a file, by number; without ``texts`` their completions are empty."""
    with pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if texts or name not in _TEXTS]
        rows = file.read(columns=names).to_pylist()
    parts: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row["group"], []).append(row)
    # with refill each place of the batch has one group with kept rollouts; groups from there on were drawn later
    places = sum(any(row.get("selected") for row in part) for part in parts.values())
    refills = settings.dead_groups == "refill"
    return [
        group_of(part, arm, run, settings, drawn=refills and number >= places) for number, part in sorted(parts.items())
    ]


def _one(arm: Arm, settings: Settings, run: Run, path: Path, number: int) -> Group | None:
    """A group of a file that was read before; None if the file has changed since."""
    try:
        groups = _read(path, arm.name, plain(run.path.name), settings, texts=True)
    except _UNREADABLE:
        return None
    return next((group for group in groups if group.group == number), None)


def _place(run: Run, path: Path) -> str:
    return plain(f"{run.path.name}/{path.name}")


def _run_place(name: str) -> tuple[int, str]:
    """The order of runs by their first number.

    >>> sorted(["seed-10", "seed-9"], key=_run_place)
    ['seed-9', 'seed-10']
    """
    digits = re.search(r"\d+", name)
    return (int(digits[0]) if digits else -1), name
