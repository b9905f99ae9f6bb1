"""Which of how many processes this is, as the launcher says in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import UserError

_SMALLEST = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
_SIZE_OF = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}


class Place(NamedTuple):
    """The number of this process, counted from 0, and how many there are."""

    rank: int = 0
    processes: int = 1


def place(environment: Mapping[str, str] | None = None) -> Place:
    """Return the place of this process, as torchrun and accelerate set it: one of one without a launcher.

    Args:
        environment: `os.environ` where None.

    Raises:
        UserError: a variable of the launcher is not a whole number, or out of range.

    >>> place({"WORLD_SIZE": "4", "RANK": "3"}), place({})
    (Place(rank=3, processes=4), Place(rank=0, processes=1))
    """
    given = os.environ if environment is None else environment
    found = {name: _number(name, given[name]) for name in _SMALLEST if name in given}
    if found.get("LOCAL_WORLD_SIZE") == 1:  # accelerate writes it on a CPU where no launcher gave the number
        del found["LOCAL_WORLD_SIZE"]
    for name, size in _SIZE_OF.items():
        if found.get(name, 0) >= found.get(size, found.get("WORLD_SIZE", 1)):
            said = f"{size} = {given[size]}" if size in found else "there is no such process"
            raise UserError(
                f"{name} = {given[name]}, but {said}: expected a number below it. Unset {name}, or start the "
                "processes with torchrun or accelerate, which set both."
            )
    return Place(found.get("RANK", 0), found.get("WORLD_SIZE", 1))


def _number(name: str, text: str) -> int:
    smallest = _SMALLEST[name]
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= smallest:
        return int(text)
    raise UserError(
        f"The environment variable {name} = {text[:60]!r}: expected a whole number of at least {smallest}. Unset it, "
        "or start the processes with torchrun or accelerate, which set it."
    )
