"""The rank of this process and the number of processes, as torchrun and accelerate set them in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import UserError

_SMALLEST = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
_SIZE_OF = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}


def get_rank() -> int:
    """Return the number of this process, counted from 0; 0 without a launcher. Raises as `get_world_size` does."""
    return rank_and_world_size(os.environ)[0]


def get_world_size() -> int:
    """Return the number of processes of this run; 1 without a launcher.

    Raises:
        UserError: a variable of the launcher is not a whole number, or is out of range.
    """
    return rank_and_world_size(os.environ)[1]


def is_launched() -> bool:
    """Whether a launcher such as torchrun or accelerate started this process."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return both, as an environment gives them.

    >>> rank_and_world_size({"WORLD_SIZE": "4", "RANK": "3"}), rank_and_world_size({})
    ((3, 4), (0, 1))
    """
    found = {name: _number(name, environment[name]) for name in _SMALLEST if name in environment}
    if found.get("LOCAL_WORLD_SIZE") == 1:  # accelerate sets it on a CPU where no launcher gave the number
        del found["LOCAL_WORLD_SIZE"]
    for name, size in _SIZE_OF.items():
        if found.get(name, 0) >= found.get(size, found.get("WORLD_SIZE", 1)):
            limit = f"{size} = {environment[size]}" if size in found else "there is no such process"
            raise UserError(
                f"{name} = {environment[name]}, but {limit}: expected a number below it. Unset {name}, or start the "
                "processes with torchrun or accelerate, which set both."
            )
    return found.get("RANK", 0), found.get("WORLD_SIZE", 1)


def _number(name: str, text: str) -> int:
    smallest = _SMALLEST[name]
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= smallest:
        return int(text)
    raise UserError(
        f"The environment variable {name} = {text[:60]!r}: expected a whole number of at least {smallest}. Unset it, "
        "or start the processes with torchrun or accelerate, which set it."
    )
