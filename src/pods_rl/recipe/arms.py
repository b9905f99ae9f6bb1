"""How an experiment's file is read: a base recipe, and arms that each set some keys of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .fields import describe
from .reading import Source

EXPERIMENT_KEYS = ("name", "base", "arms", "baseline", "seeds", "accelerate")  # the others are recipe keys of all arms
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_TAKEN = ("report", "configs", "logs")  # directories of the experiment itself

ReadBase = Callable[[str, Path], dict[str, Any]]


def split_experiment(
    values: Mapping[str, Any], source: Source, read_base: ReadBase
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The keys that all arms share, and those that each arm sets, by name; unchecked as recipe keys.

    Args:
        values: the file's mapping: ``base`` is a mapping or a name, keys beside ``arms`` are for all arms.
        read_base: gives the keys of a base that is named, from the name and the file's directory.

    Raises:
        UserError: arms without names or keys, a name that can be no directory, a base that is neither, a seed.
    """
    arms = _arms(values.get("arms"), source)
    base = _base(values.get("base", {}), source, read_base)
    base |= {key: value for key, value in values.items() if key not in EXPERIMENT_KEYS}
    if "seed" in base:
        raise UserError(f"{source.where('seed')}seed: an experiment has seeds: a count or a list.")
    return base, arms


def _arms(arms: Any, source: Source) -> dict[str, dict[str, Any]]:
    where = source.where("arms")
    if not isinstance(arms, dict) or not arms:
        raise UserError(f"{where}arms: expected names with the keys each sets, as in `pods: {{num_rollouts: 64}}`.")
    for name, keys in arms.items():
        if not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(
                f"{where}arms: {describe(name)} cannot name a directory of runs: use letters, digits, '-', '_' and "
                f"'.', and none of {', '.join(_TAKEN)}."
            )
        if keys is not None and not isinstance(keys, dict):
            raise UserError(f"{where}arms: {name}: got {describe(keys)}, expected keys, as in {{num_rollouts: 64}}.")
        if "seed" in (keys or {}):
            raise UserError(f"{where}arms: {name}: seed: arms share their seeds: use seeds.")
    return {name: dict(keys or {}) for name, keys in arms.items()}


def _base(base: Any, source: Source, read_base: ReadBase) -> dict[str, Any]:
    if isinstance(base, dict):
        return dict(base)
    if not isinstance(base, str):
        raise UserError(
            f"{source.where('base')}base: got {describe(base)}, expected a recipe's name or path, or its keys."
        )
    return read_base(base, Path(source.name).parent)
