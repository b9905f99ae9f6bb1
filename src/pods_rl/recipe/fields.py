"""One key of a recipe: its type, default and help, and the conversion of values from YAML or the command line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..text import describe, suggest
from ..yaml_files import YAMLError, parse_value

COMPUTED = "(chosen at run time)"  # a default that is not a literal in the source
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "None": "null",
}
_NUMBERS = frozenset(("int", "float"))
_LARGEST = 2**63 - 1  # torch and the files of a run cannot hold larger integers
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


class _WrongTypeError(Exception):
    """The value has no type that its key accepts."""


@dataclass(frozen=True)
class Field:
    """A key of a recipe.

    Args:
        kinds: the YAML types it accepts (keys of `KINDS`, or ``Any``).
        section: the part of a run that reads this key: engine, model, task or run.
        source: the origin of its default.
        item: the types of a list's items, if known.
        within: the interval of a number, as in ``(0, 1]``; a bracket includes its end. Empty: any number.
    """

    name: str
    kinds: frozenset[str]
    default: Any
    help: str
    section: str
    source: str
    item: frozenset[str] | None = None
    choices: tuple[str, ...] = ()
    within: str = ""

    @property
    def expected(self) -> str:
        """The accepted values, in words.

        >>> Field("x", frozenset({"float", "None"}), None, "", "run", "").expected
        'a number or null'
        """
        if self.choices and self.kinds <= {"str", "list", "None"}:
            return f"one of {', '.join(self.choices)}{' or null' if 'None' in self.kinds else ''}"
        return "anything" if "Any" in self.kinds else _in_words(self.kinds)

    def convert(self, value: Any) -> Any:
        """Return the value as this key's type; raise ValueError (what was given, what was expected) if it has another.

        Numbers written as text are read as numbers: YAML 1.1 reads ``1e-6`` as text, and its meaning is clear.

        >>> Field("learning_rate", frozenset({"float"}), 1e-6, "", "engine", "").convert("1e-6")
        1e-06
        """
        check_plain(value)
        if "Any" in self.kinds:
            return value
        try:
            converted = _convert(value, self.kinds)
        except _WrongTypeError:
            raise ValueError(f"got {describe(value)}, expected {self.expected}.") from None
        if self.choices and isinstance(converted, str) and converted not in self.choices:
            near = suggest(converted, self.choices)
            raise ValueError(f"got {describe(value)}.{near} Expected {self.expected}.")
        if self.within and isinstance(converted, (int, float)) and not inside(converted, self.within):
            raise ValueError(f"got {converted}, expected a number in {self.within}.")
        if isinstance(converted, list) and self.item is not None:
            return [self._item(place, item, self.item) for place, item in enumerate(converted, start=1)]
        return converted

    def parse(self, text: str) -> Any:
        """Return the value of a command-line word, read as YAML unless the key accepts only text.

        >>> Field("seeds", frozenset({"list"}), None, "", "run", "").parse("[1, 2]")
        [1, 2]
        """
        if self.kinds <= {"str"}:
            return self.convert(text)
        try:
            value = parse_value(text)
            if "str" in self.kinds:  # `--run_name 12` is a name, `--run_name #1` is not a comment
                _convert(value, self.kinds - {"str"})
                if value is None and text.strip() not in ("null", "~"):
                    value = text
        except (YAMLError, _WrongTypeError):
            value = text
        return self.convert(value)

    def _item(self, place: int, item: Any, kinds: frozenset[str]) -> Any:
        try:
            return _convert(item, kinds)
        except _WrongTypeError:
            wanted = _in_words(kinds)
            raise ValueError(f"got {describe(item)} as item {place} of the list, expected {wanted}.") from None


def _in_words(kinds: frozenset[str]) -> str:
    return " or ".join(words for kind, words in KINDS.items() if kind in kinds)


def _convert(value: Any, kinds: frozenset[str]) -> Any:
    """Return the value as one of these types, or raise _WrongTypeError."""
    if value is None:
        if "None" in kinds:
            return None
    elif isinstance(value, bool):
        if "bool" in kinds:
            return value
        if not value and "str" in kinds:  # YAML 1.1 reads a bare `no` as false
            return "no"
    elif isinstance(value, (int, float)):
        return _convert_number(value, kinds)
    elif isinstance(value, str):
        if "str" in kinds:
            return value
        if kinds & _NUMBERS and _NUMBER.fullmatch(value.strip()):
            return _convert_number(float(value), kinds)
        if "list" in kinds:
            return [value]  # `lora_target_modules: all-linear`
    elif isinstance(value, Mapping):
        if "dict" in kinds:
            return value
    elif isinstance(value, (list, tuple)) and "list" in kinds:
        return list(value)
    raise _WrongTypeError


def _convert_number(value: int | float, kinds: frozenset[str]) -> int | float:
    if isinstance(value, int):
        plain = abs(value) <= _LARGEST and bool(kinds & _NUMBERS)
    else:
        plain = math.isfinite(value) and ("float" in kinds or ("int" in kinds and value == int(value) <= _LARGEST))
    if not plain:
        raise _WrongTypeError
    return value if isinstance(value, int) or "float" in kinds else int(value)


def check_plain(value: Any) -> None:
    """Raise ValueError for a list or mapping that cannot be written into the files of a run and read back.

    >>> check_plain({"a": [1, float("inf")]})
    Traceback (most recent call last):
    ...
    ValueError: got the mapping {'a': [1, inf]}, expected finite numbers and text in it, and text as keys.
    """
    if isinstance(value, (str, int, float, type(None))):
        return
    try:
        plain = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):  # a date, infinity, itself
        plain = False
    if not plain:
        raise ValueError(f"got {describe(value)}, expected finite numbers and text in it, and text as keys.")


def inside(value: float, interval: str) -> bool:
    """Return whether a number lies in an interval; a bracket includes its end, a parenthesis does not.

    >>> inside(1, "(0, 1]"), inside(0, "(0, 1]"), inside(5, "[1, inf)"), inside(float("nan"), "[0, 1]")
    (True, False, True, False)
    """
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
