"""What a script trains on and is rewarded by, as hashes: compared where a run continues, and between arms."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from ....runs.identity import MODULES
from ....runs.sources import code_hash, file_hashes, user_sources
from ....tables import rows_hash

if TYPE_CHECKING:
    from ..trainer import PODSTrainer

_SCRIPT = "__main__"
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def script_contents(trainer: PODSTrainer) -> dict[str, dict[str, str]]:
    """Return hashes of the rows of a trainer's data, of its reward functions, and of the user's modules.

    Of a reward in the script itself it is the source of the function and of what it uses of the script: another line of
    the script may change. A stream of data and a reward model have no hash.
    """
    rewards: dict[str, str] = {}
    for name, reward in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        if not callable(reward) or hasattr(reward, "parameters"):
            continue
        key = name if name not in rewards else f"{name} ({len(rewards)})"
        rewards[key] = _reward_hash(reward)
    contents = {
        "prompts": _rows(trainer),
        "reward_funcs": rewards,
        MODULES: file_hashes(user_sources()),
    }
    return {key: hashes for key, hashes in contents.items() if hashes}


def _rows(trainer: PODSTrainer) -> dict[str, str]:
    """Return the hashes of the rows that are trained, and of those of all evaluation sets."""
    hashes = {}
    eval_data: Any = getattr(trainer, "eval_dataset", None)
    sets = eval_data if isinstance(eval_data, Mapping) else {"": eval_data}
    with suppress(Exception):  # data of a form that has no rows
        if isinstance(trainer.train_dataset, Sized):
            hashes["train"] = rows_hash(trainer.train_dataset)
        if all(isinstance(rows, Sized) for rows in sets.values()):
            of_sets = {name: rows_hash(rows) for name, rows in sets.items()}
            hashes["test"] = of_sets[""] if "" in of_sets else _digest(sorted(of_sets.items()))
    return hashes


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()


def _reward_hash(reward: Callable[..., Any]) -> str:
    """Return a hash of a function and of what it uses of its script."""
    parts: list[Any] = []
    queue: list[Any] = [reward]
    seen: set[int] = set()
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        constant = _constant(value)
        if constant is not None:
            parts.append(constant)
        elif isinstance(value, partial):
            queue += [value.func, *value.args, *value.keywords, *value.keywords.values()]
        elif callable(value):
            # code that was typed into an interpreter has no source
            code = getattr(inspect.unwrap(value), "__code__", None)
            parts.append(code_hash(value) or (_digest(_bytes_of(code)) if code else getattr(value, "__qualname__", "")))
            if value is reward or getattr(value, "__module__", None) == _SCRIPT:
                queue += _used(inspect.unwrap(value))
    return _digest(sorted(map(str, parts)))


def _constant(value: Any) -> str | None:
    """Return the text of a number, a text or a tuple of them; None for anything else, such as a script's options."""
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if not isinstance(value, tuple):
        return None
    entries = [_constant(entry) for entry in value]
    return None if None in entries else repr(entries)


def _bytes_of(code: CodeType) -> list[Any]:
    return [code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)]]


def _used(function: Any) -> Iterator[Any]:
    """Yield the global values that a function of a script names, and the values that it closes over."""
    code = getattr(function, "__code__", None)
    if code is None:  # an object of a class, or a class
        kind = function if inspect.isclass(function) else type(function)
        yield from (method for method in vars(kind).values() if inspect.isfunction(method))
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    codes = [code]
    while codes:
        part = codes.pop()
        codes += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        for name in part.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
