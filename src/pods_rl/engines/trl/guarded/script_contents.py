"""What a script trains on and is rewarded by, as hashes: compared where a run continues, and between arms."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ....runs.identity import MODULES
from ....runs.sources import code_hash, file_hashes, user_sources
from ....tables import rows_hash

if TYPE_CHECKING:
    from ..trainer import PODSTrainer

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def script_contents(trainer: PODSTrainer) -> dict[str, dict[str, str]]:
    """Return hashes of the rows of a trainer's data, of its reward functions, and of the user's modules.

    A reward in the script itself is hashed as a function: another line of the script may change. A stream of data and a
    reward model have no hash.
    """
    rewards: dict[str, str] = {}
    for name, reward in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        if not callable(reward) or hasattr(reward, "parameters"):
            continue
        key = name if name not in rewards else f"{name} ({len(rewards)})"
        rewards[key] = _reward_hash(reward)
    prompts: dict[str, str] = {}
    eval_data: Any = getattr(trainer, "eval_dataset", None)
    eval_sets = eval_data if isinstance(eval_data, Mapping) else {"": eval_data}
    with suppress(Exception):  # data of a form that has no rows
        if isinstance(trainer.train_dataset, Sized):
            prompts["train"] = rows_hash(trainer.train_dataset)
        if all(isinstance(rows, Sized) for rows in eval_sets.values()):
            of_sets = {name: rows_hash(rows) for name, rows in eval_sets.items()}
            # One hash for all sets. A trainer with a single one has no names of sets.
            prompts["test"] = of_sets[""] if "" in of_sets else _digest(sorted(of_sets.items()))
    contents = {
        "prompts": prompts,
        "reward_funcs": rewards,
        MODULES: file_hashes(user_sources()),
    }
    return {key: hashes for key, hashes in contents.items() if hashes}


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()


def _reward_hash(reward: Callable[..., Any]) -> str:
    """Return a hash of a function's source, and of the numbers and texts that it is bound to."""
    bound: list[Any] = []
    while isinstance(reward, partial):
        bound += [*reward.args, *reward.keywords, *reward.keywords.values()]
        reward = reward.func
    function = inspect.unwrap(reward)
    bound += getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            bound.append(cell.cell_contents)
    # code that was typed into an interpreter has no source
    source = code_hash(reward) or getattr(reward, "__qualname__", type(reward).__name__)
    return _digest([source, *(value for value in bound if isinstance(value, _CONSTANTS))])
