"""The rollout ledger of engines other than TRL, in the columns of `pods train` (docs/architecture.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runs import write_parquet
from ..tables import columns_of

HELD_STEPS = 16


class LedgerWriter:
    """Writes one file for each step that is kept: step 1 and every `every`-th.

    An engine may add the groups of a step in several parts, and with asynchronous generation also those of an earlier
    step. Group numbers continue from part to part, and each part writes the step's file again with all of its groups.
    The groups of the last 16 kept steps are held for that.

    Args:
        folder: of the files `step-000001.parquet`.
        every: the steps to keep.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._rows: dict[int, list[dict[str, Any]]] = {}  # of each step, a row for each rollout
        self._groups: dict[int, int] = {}  # of each step, the number of groups

    def keeps(self, step: int) -> bool:
        """Return whether this step is written, so that its rows are needed."""
        return step == 1 or step % self._every == 0

    def add(self, step: int, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Write the groups to the file of their step, after those that were added before.

        Args:
            step: one that is kept.
            groups: of each group, a row for each rollout, with all columns except `step` and `group`.
        """
        rows = self._rows.setdefault(step, [])
        first_group = self._groups.get(step, 0)
        for number, group in enumerate(groups, start=first_group):
            rows += [{"step": step, "group": number, **row} for row in group]
        self._groups[step] = first_group + len(groups)
        for old_step in sorted(self._rows)[:-HELD_STEPS]:
            del self._rows[old_step]
            del self._groups[old_step]
        columns = columns_of(rows, missing=math.nan)  # of a part of the reward that a rollout does not have
        if not any(columns["turn_rewards"]):
            del columns["turn_rewards"]
        # Parquet cannot be appended to: each part writes the file of its step again.
        write_parquet(self._folder / f"step-{step:06d}.parquet", columns)
