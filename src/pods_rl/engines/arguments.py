"""Check the arguments of a trainer's constructor, for engines that extend TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..text import describe


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments that TRL would use as something else than they are, long after it could say so.

    Args:
        arguments: of the constructor of TRL's trainer, by name. A missing one is not checked.

    Raises:
        TypeError: an argument of another type, or prompts that are not text or messages.
        ValueError: training data without the column `prompt`.

    >>> check_arguments({"reward_funcs": 5})
    Traceback (most recent call last):
    TypeError: reward_funcs must be a function, a model or its name, or a list of these; got 5.
    """
    _check("model", arguments, _is_model, "a model, or its name or folder")
    _check_each(
        "reward_funcs",
        arguments,
        lambda value: _is_model(value) or _is_function(value),
        "a function, a model or its name",
    )
    _check_each("tools", arguments, _is_function, "a function", needs_list=True)
    _check_each(
        "callbacks", arguments, lambda value: hasattr(value, "on_init_end"), "a TrainerCallback", needs_list=True
    )
    _check("rollout_func", arguments, _is_function, "a function of the prompts and the trainer")
    _check("environment_factory", arguments, _is_factory, "a class or function, or a mapping of names to these")
    _check(
        "optimizers",
        arguments,
        lambda value: isinstance(value, (tuple, list)) and len(value) == 2,
        "a tuple of an optimizer and a schedule, each of which may be None",
    )
    _check_data(arguments.get("train_dataset"))


def _check(name: str, arguments: Mapping[str, Any], is_right: Callable[[Any], bool], expected: str) -> None:
    value = arguments.get(name)
    # TRL itself says which arguments it cannot do without, except these
    is_given = value is not None or (name in arguments and name in ("model", "optimizers"))
    if is_given and not is_right(value):
        raise _wrong_type(name, expected, value)


def _check_each(
    name: str, arguments: Mapping[str, Any], is_right: Callable[[Any], bool], kind: str, *, needs_list: bool = False
) -> None:
    """Check an argument that is a list of values of one kind, or one such value unless it `needs_list`."""
    value = arguments.get(name)
    if isinstance(value, list):
        for index, entry in enumerate(value):
            if not is_right(entry):
                raise _wrong_type(f"{name}[{index}]", kind, entry)
    elif value is not None and (needs_list or not is_right(value)):
        expected = f"a list, each entry {kind}" if needs_list else f"{kind}, or a list of these"
        raise _wrong_type(name, expected, value)


def _wrong_type(name: str, expected: str, value: Any) -> TypeError:
    given = f"the class {value.__name__}" if isinstance(value, type) else describe(value)
    return TypeError(f"{name} must be {expected}; got {given}.")


def _is_model(value: Any) -> bool:
    return isinstance(value, (str, nn.Module))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_factory(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(callable(factory) for factory in value.values())
    return callable(value)


def _check_data(data: Any) -> None:
    """Raise unless training data have prompts that TRL can read, as far as this is known before they are read."""
    names = getattr(data, "column_names", None)  # None also for a stream whose columns are not known
    if not isinstance(names, list):
        return
    if "prompt" not in names:
        raise ValueError(
            f"train_dataset must have a column prompt; it has {', '.join(names) or 'no columns'}. Rename yours with "
            'train_dataset.rename_column(old, "prompt").'
        )
    if not hasattr(data, "__len__") or len(data) == 0:  # a stream, or a check of the number of prompts follows
        return
    prompt = data.select_columns("prompt")[0]["prompt"]
    if not isinstance(prompt, (str, list)):
        raise TypeError(
            f"the prompts of train_dataset must be text, or lists of chat messages; the first is {describe(prompt)}."
        )
