"""Regular expressions take a time that a text's length bounds: no back-reference, no repetition that has two ways.

Every pattern of the package is found in its source and parsed. Three things make its time grow faster than its text: a
back-reference to an endless group; an endless repetition within an endless one, if what follows may also belong to it;
and two endless repetitions next to each other that share a character, which is allowed where texts are short.
"""

from __future__ import annotations

import ast
import importlib
import re
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from re import _constants, _parser  # the parser of `re` itself
from typing import Any

import pods_rl
from pods_rl.recipe import recipe
from pods_rl.rewards import accuracy, extraction
from pods_rl.rewards.mathematics import MAX_LENGTH, choices, decide, is_code, plain, read_number, values

ROOT = Path(pods_rl.__file__).parent
FUNCTIONS = {"compile", "sub", "subn", "match", "search", "fullmatch", "split", "findall", "finditer"}
ALPHABET = frozenset(string.printable + "’–é₂πｘ")
ENDLESS = 64  # repetitions
REPETITIONS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT, _constants.AT)
SHORT = (  # texts of at most MAX_LENGTH characters
    "rewards/mathematics/", "rewards/chemistry.py", "choices", "values",
)  # fmt: skip
REVIEWED = {
    extraction._BETWEEN.pattern: "at most 60 characters between two boxes",
    recipe._IMPORT_PATH.pattern: "a name in the user's own recipe",
}
MADE_ELSEWHERE = ("rewards/mathematics/choices.py", "rewards/mathematics/values.py")  # `patterns` adds them


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function of `re`."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and node.func.attr in FUNCTIONS:
                yield path, node


def module_of(path: Path) -> Any:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return importlib.import_module(".".join(parts).removesuffix(".__init__"))


class Filled(ast.NodeTransformer):
    """Writes "x" for the parts of an f-string that only a running function knows."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        known = all(part.id in self.names for part in ast.walk(node) if isinstance(part, ast.Name))
        return node if known else ast.Constant("x")


def in_tables(value: Any) -> Iterator[re.Pattern[str]]:
    """The compiled patterns in the tables of a module."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from in_tables(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from in_tables(item)


@cache
def patterns() -> dict[str, tuple[str, int]]:
    """Every pattern with its flags, by its place."""
    found = {}
    tables = {"choices": choices._labels_except("B"), "values": [re.compile(row[0]) for row in values._REWRITES]}
    for path, call in calls():
        place = f"{path.relative_to(ROOT)}:{call.lineno}"
        module = module_of(path)
        tables.setdefault(place.partition(":")[0], list(vars(module).values()))
        arguments = [Filled(vars(module)).visit(call.args[0])]
        flags = [flag for flag in call.keywords if flag.arg == "flags"]
        if call.func.attr == "compile":
            arguments += call.args[1:]
        made = ast.Expression(ast.Call(ast.Name("compile_pattern", ast.Load()), arguments, flags))
        names = vars(module) | {"compile_pattern": re.compile}
        try:
            pattern = eval(compile(ast.fix_missing_locations(made), place, "eval"), names)
        except NameError:
            assert place.startswith(MADE_ELSEWHERE), place
            continue
        found[place] = (pattern.pattern, pattern.flags)
    for name, table in tables.items():
        found |= {f"{name}: {pattern.pattern}": (pattern.pattern, pattern.flags) for pattern in in_tables(table)}
    return found


def first(items: Any) -> tuple[frozenset[str], bool]:
    """The characters that a sequence may begin with, and whether it may be empty."""
    begins = frozenset()
    for item in items:
        characters, may_be_empty = first_of(item)
        begins |= characters
        if not may_be_empty:
            return begins, False
    return begins, True


def first_of(item: Any) -> tuple[frozenset[str], bool]:
    kind, argument = item
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
        low, _, body = argument
        characters, may_be_empty = first(body)
        return characters, may_be_empty or low == 0
    if kind is _constants.SUBPATTERN:
        return first(argument[-1])
    if kind is _constants.ATOMIC_GROUP:
        return first(argument)
    if kind is _constants.BRANCH:
        branches = [first(branch) for branch in argument[1]]
        return frozenset().union(*(begins for begins, _ in branches)), any(empty for _, empty in branches)
    if kind in LOOKS:
        return frozenset(), True
    if kind in (_constants.GROUPREF, _constants.GROUPREF_EXISTS):
        return ALPHABET, True
    return one_of(item), False


_MATCHED: dict[str, frozenset[str]] = {}


def one_of(item: Any) -> frozenset[str]:
    """The characters that an item of one character matches, in either case."""
    name = repr(item)
    if name not in _MATCHED:
        state = _parser.State()
        state.str = ""
        single = re._compiler.compile(_parser.SubPattern(state, [item]), re.IGNORECASE)
        _MATCHED[name] = frozenset(filter(single.fullmatch, ALPHABET))
    return _MATCHED[name]


def parts_of(item: Any) -> list[Any]:
    """The sequences within an item."""
    kind, argument = item
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
        return [argument[2]]
    if kind is _constants.SUBPATTERN:
        return [argument[-1]]
    if kind is _constants.BRANCH:
        return argument[1]
    if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
        return [argument[1]]
    return [argument] if kind is _constants.ATOMIC_GROUP else []


def is_repeated(characters: frozenset[str], items: Any) -> bool:
    """Whether a sequence reaches an endless repetition of one of the characters, over nothing else than these."""
    for item in items:
        kind, argument = item
        begins, may_be_empty = first_of(item)
        if kind in REPETITIONS and argument[1] >= ENDLESS and len(argument[2]) == 1 and begins & characters:
            return True
        if kind not in LOOKS and any(is_repeated(characters, part) for part in parts_of(item)):
            return True
        if not may_be_empty and not begins & characters:
            return False
    return False


def faults(items: Any, widths: list[Any], following: frozenset[str] | None = None) -> Iterator[str]:
    """What makes the time of a pattern grow faster than its text.

    `widths`: the shortest and the longest text of each group.
    `following`: what may follow the sequence in the endless repetition around it; None if there is none.
    """
    items = list(items)
    for position, item in enumerate(items):
        kind, argument = item
        after = None
        if following is not None and kind not in LOOKS:
            begins, may_be_empty = first(items[position + 1 :])
            after = begins | following if may_be_empty else begins
        if kind is _constants.GROUPREF and widths[argument][1] >= ENDLESS:
            yield "back-reference"
        if kind in REPETITIONS and argument[1] >= ENDLESS:
            begins, _ = first(argument[2])
            if after is not None and begins & after:
                yield "repetition within a repetition"
            if len(argument[2]) == 1 and is_repeated(begins, items[position + 1 :]):
                yield "repetition next to a repetition"
            after = begins | (after or frozenset())
        for part in parts_of(item):
            yield from faults(part, widths, after)


def faults_of(pattern: str, flags: int = 0) -> set[str]:
    parsed = _parser.parse(pattern, flags)
    return set(faults(parsed, parsed.state.groupwidths))


def test_the_faults_of_a_pattern_are_found():
    expected = {
        r"(a+)b\1": {"back-reference"},
        r"(['\"])a+\1": set(),
        r"[0-9]*([0-9])\1+": {"repetition next to a repetition"},
        r"(?:a+)+b": {"repetition within a repetition"},
        r"(?:a*\s*)*b": {"repetition within a repetition"},
        r"(?:(?:a|b+c?)+,?)*": {"repetition within a repetition"},
        r"\d+\.?\d*": {"repetition next to a repetition"},
        r"\s*(?:x?\s*y)?": {"repetition next to a repetition"},
        r"(?:a+,)*a+b": set(),
        r"\d+(?:\.\d*)?": set(),
        r"(?:,[0-9]{3})+[0-9]*": set(),
    }
    assert {pattern: faults_of(pattern) for pattern in expected} == expected


def test_no_pattern_reads_a_text_in_two_ways():
    found = {place: faults_of(*pattern) for place, pattern in patterns().items()}
    assert len(found) > 250
    for place, kinds in found.items():
        if place.startswith(SHORT) or patterns()[place][0] in REVIEWED:
            kinds.discard("repetition next to a repetition")
    assert {place: kinds for place, kinds in found.items() if kinds} == {}


def test_no_pattern_of_mathematics_reads_a_text_of_unlimited_length():
    for text in ("9" * (MAX_LENGTH + 1), "0." + "9" * MAX_LENGTH, "π" * MAX_LENGTH, "ﷺ" * (MAX_LENGTH // 10)):
        assert plain(text) == ""
        assert decide(text, "18") is False
        assert decide("18", text) is False
        assert not is_code(text)
    assert read_number("9" * (MAX_LENGTH + 1)) is None
    assert accuracy(rf"\boxed{{0.{'9' * 1_000_000}}}", "1") == 0.0
