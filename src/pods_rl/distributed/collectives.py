"""Processes of one `torch.distributed` group: the rows of each, and values exchanged between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def own_rows(total: int) -> range:
    """Return the rows that this process completes: every Nth row of N processes, from its rank.

    >>> own_rows(5)
    range(0, 5)
    """
    return range(_rank(), total, _world())


def gather(items: Sequence[_T]) -> list[_T]:
    """Return the items of all processes on every process, ordered by rank. Each process must call it.

    >>> gather(["a", "b"])
    ['a', 'b']
    """
    if _world() == 1:
        return list(items)
    parts: list[Sequence[_T]] = [[] for _ in range(_world())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def agree(value: _T) -> _T:
    """Return the first process's value on every process, since clocks and signals differ. Call this on every process.

    >>> agree(1.5)
    1.5
    """
    if _world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def alone() -> bool:
    """Return whether there is only one process.

    >>> alone()
    True
    """
    return _world() == 1


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world() > 1 else 0
