"""One key of a recipe: its type, default and help, and the conversion of values from YAML or the command line."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from .reading import YAMLError, load_yaml, short

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
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_LARGEST = 2**63 - 1  # torch and the files of a run cannot hold larger integers
_MOST_ITEMS = 10_000  # in a list or mapping, at all levels
_DEEPEST = 32
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
        if "Any" in self.kinds:
            return "anything"
        words = _in_words(self.kinds)
        return words.replace("text", " or ".join(self.choices)) if self.choices and self.kinds & _NUMBERS else words

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
            converted = _convert(value, self.kinds, self.choices)
        except _WrongTypeError:
            raise ValueError(f"got {describe(value)}, expected {self.expected}") from None
        if self.choices and isinstance(converted, str) and converted not in self.choices:
            raise ValueError(f"got {describe(value)}, expected {self.expected}{_near(converted, self.choices)}")
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
            value, _ = load_yaml(text)
            if "str" in self.kinds:  # `--run_name 12` is a name, `--answer_after ####` is not a comment
                _convert(value, self.kinds - {"str"}, self.choices)
                if value is None and text.strip() not in ("null", "~"):
                    value = text
        except (YAMLError, _WrongTypeError):
            value = text
        return self.convert(value)

    def _item(self, place: int, item: Any, kinds: frozenset[str]) -> Any:
        try:
            converted = _convert(item, kinds)
            if not self.choices or converted in self.choices:
                return converted
        except _WrongTypeError:
            if not self.choices:
                raise ValueError(
                    f"got {describe(item)} as item {place} of the list, expected {_in_words(kinds)}"
                ) from None
        near = _near(str(item), self.choices)
        raise ValueError(f"got {describe(item)} in the list, expected some of {', '.join(self.choices)}{near}")


def _near(word: str, choices: Iterable[str]) -> str:
    """Return `` (did you mean ...?)``, or nothing if no choice is near."""
    hint = suggest(word, choices).strip()
    return f" ({hint[0].lower()}{hint[1:]})" if hint else ""


def _in_words(kinds: frozenset[str]) -> str:
    return " or ".join(words for kind, words in KINDS.items() if kind in kinds)


def _convert(value: Any, kinds: frozenset[str], choices: tuple[str, ...] = ()) -> Any:
    """Return the value as one of these types, or raise _WrongTypeError."""
    if value is None:
        if "None" in kinds:
            return None
    elif isinstance(value, bool):
        if "bool" in kinds:
            return value
        if not value and "no" in choices:  # YAML 1.1 reads a bare `no` as false
            return "no"
    elif isinstance(value, (int, float)):
        return _convert_number(value, kinds)
    elif isinstance(value, str):
        if "str" in kinds and not (choices and kinds & _NUMBERS and value not in choices):
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
    if isinstance(value, int) and kinds & _NUMBERS:
        return value
    if math.isfinite(value) and "float" in kinds:
        return value
    if math.isfinite(value) and "int" in kinds and value == int(value):
        check_plain(int(value))
        return int(value)
    raise _WrongTypeError


def check_plain(value: Any) -> None:
    """Raise ValueError for a value that cannot be written into the files of a run and read back.

    Text, finite numbers, true, false, null, lists, and mappings with text as keys can, unless they contain themselves.

    >>> check_plain({"a": [1, float("inf")]})
    Traceback (most recent call last):
    ...
    ValueError: got inf in it, expected a finite number
    """
    left, seen = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        seen += 1
        if seen > _MOST_ITEMS or depth > _DEEPEST:
            raise ValueError(
                f"holds more than {_MOST_ITEMS:,} items or {_DEEPEST} levels, or itself: expected a value that fits a "
                "file"
            )
        inside = " in it" if depth else ""
        if isinstance(item, Mapping):
            left += [(part, depth + 1) for part in item.values()]
            for key in item:
                if not isinstance(key, str):
                    raise ValueError(f"got {describe(key)} as a key, expected text: put it in quotes")
        elif isinstance(item, (list, tuple)):
            left += [(part, depth + 1) for part in item]
        elif isinstance(item, int):
            if abs(item) > _LARGEST:
                raise ValueError(f"got {describe(item)}, expected a number of at most {_LARGEST}")
        elif isinstance(item, float):
            if depth and not math.isfinite(item):
                raise ValueError(f"got {describe(item)}{inside}, expected a finite number")
        elif item is not None and not isinstance(item, str):
            raise ValueError(f"got {describe(item)}{inside}, expected text or a number: put it in quotes")


def inside(value: float, interval: str) -> bool:
    """Return whether a number lies in an interval; a bracket includes its end, a parenthesis does not.

    >>> inside(1, "(0, 1]"), inside(0, "(0, 1]"), inside(5, "[1, inf)"), inside(float("nan"), "[0, 1]")
    (True, False, True, False)
    """
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def interval_in_words(interval: str) -> str:
    """Return an interval for a message.

    >>> interval_in_words("(0, 1]"), interval_in_words("[1, inf)"), interval_in_words("[0, 1)")
    ('more than 0 and at most 1', 'at least 1', 'at least 0 and less than 1')
    """
    words = (("at least", "more than")[interval[0] == "("], ("at most", "less than")[interval[-1] == ")"])
    ends = [(word, float(end)) for word, end in zip(words, interval[1:-1].split(","), strict=True)]
    return " and ".join(f"{word} {end:.15g}" for word, end in ends if math.isfinite(end)) or "a number"


def describe(value: Any) -> str:
    """Return a value and its type, short enough for a message.

    >>> describe([1, 2]), describe(True), describe(None)
    ('the list [1, 2]', 'true', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**60:  # Python refuses to print numbers of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = short(_SHORT.repr(value))  # Repr handles a list that contains itself
    kind = {str: "the text ", list: "the list ", dict: "the mapping ", int: "", float: ""}.get(type(value))
    return f"{type(value).__name__} {text}" if kind is None else kind + text


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean ...?``, or nothing if no known word is near.

    >>> suggest("num_rolouts", ["num_rollouts", "seed"])
    ' Did you mean num_rollouts?'
    """
    plain = {name.replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(word.replace("-", "_"), plain, n=1, cutoff=0.7)
    return f" Did you mean {plain[near[0]]}?" if near else ""


def listed(problems: Iterable[str], count: int, most: int = 5) -> str:
    """Return the first problems, one per line, and the number of the others.

    Args:
        problems: read one by one, because each may be slow to make (``suggest``).
        count: how many there are.

    >>> listed(iter(["a is wrong.", "b is wrong."]), 2, most=1)
    'a is wrong.\\n... and 1 more.'
    """
    lines = list(itertools.islice(problems, most))
    return "\n".join(lines + ([f"... and {count - len(lines)} more."] if count > len(lines) else []))
