r"""Read the structure of an answer: lists, sets, tuples, intervals and relations, around expressions.

An answer is split at the separators, relation signs and brackets outside every bracket; the rest are expressions
(`equality.value` evaluates them). Nothing is evaluated here.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .numeric import is_name

BRACKETS = ("()", "[]", "(]", "[)")


class Node(NamedTuple):
    """An expression ("value": its text), a chain of sides with signs ("relation"), or a group of answers.

    A group is a "list", a list joined by "and" or "or", a "set", "union", "minus", "ratio", or a pair of brackets.
    """

    kind: str
    items: tuple[Any, ...] = ()
    signs: tuple[str, ...] = ()
    text: str = ""

    @property
    def equation(self) -> bool:
        return self.kind == "relation" and set(self.signs) <= {"=", "in"}


_TOKEN = re.compile(
    r"(?P<open>\\\{|\\(?:langle|lfloor|lceil|begin)(?![a-z])|[({\[])"
    r"|(?P<close>\\\}|\\(?:rangle|rfloor|rceil|end)(?![a-z])|[)}\]])"
    r"|(?P<list>(?:[,;]\s*)?(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:land|lor|wedge|vee)(?![a-z]))|,)|(?P<rows>;)"
    r"|(?P<relation>\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|in|approx)(?![a-z])|:=|<=|>=|!=|=|<|>)"
    r"|(?P<group>\\(?:cup|cap|setminus|backslash)(?![a-z]))"
    r"|(?P<ratio>:|(?<![A-Za-z\\])to(?![A-Za-z]))|\\[A-Za-z]+|.",
    re.DOTALL,
)
_SIGNS = {
    r"\leq": "<=", r"\le": "<=", r"\leqslant": "<=", r"\geq": ">=", r"\ge": ">=", r"\geqslant": ">=",
    r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\neq": "!=", r"\in": "in", ":=": "=",
}  # fmt: skip
_PAIRS = {
    ("(", ")"): "()", ("[", "]"): "[]", ("(", "]"): "(]", ("[", ")"): "[)",
    (r"\{", r"\}"): "set", (r"\langle", r"\rangle"): "()", ("{", "}"): "braces",
}  # fmt: skip
_GROUPS = {r"\cup": "union", r"\cap": "cap", r"\setminus": "minus", r"\backslash": "minus"}
_BASE_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_IN_BASE = re.compile(
    r"\(?\s*([0-9][0-9A-Fa-f]*)\s*\)?\s*_\s*\{?\s*\(?([0-9]+|" + "|".join(_BASE_WORDS) + r")\)?\s*\}?"
)
_THOUSANDS = re.compile(r"(?<![0-9.,_^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
_BUILDER = re.compile(r"\s*([^,:|]*?)\s*(?:\\mid|:|\|)\s*(.*[<>=].*|.*\\(?:le|ge|lt|gt|ne).*)", re.DOTALL)
_SIGNED = re.compile(r"\\(?:pm|mp)(?![a-z])")
_INTERVAL = re.compile(r"([\](\[])([^\[\]()]*,[^\[\]()]*)([\[\])])")  # also ]2, 5[
_POINT = re.compile(r"[ABD-OQ-Z]\s*=?\s*(\((?:[-+0-9.,;/ ]|\\frac|\\sqrt|[{}])+\))")  # A(2, 3)


def structure(text: str) -> Node:
    r"""Return the structure of a `plain` text.

    >>> [structure(text).kind for text in ("x < 3", "1, 2 and 3", r"\{1, 2\}", "[0,1)", "2x+1")]
    ['relation', 'list', 'set', '[)', 'value']
    """
    return read(_INTERVAL.sub(_pointing_in, _ungrouped(text)))


def read(text: str) -> Node:
    """Return the structure of a text whose commas separate items and whose brackets point inwards."""
    text = text.strip()
    if point := _POINT.fullmatch(text):
        text = point[1]
    if base := _IN_BASE.fullmatch(text):
        number = str(_BASE_WORDS.index(base[2]) + 2) if base[2].isalpha() else base[2]
        return Node("base", text=f"{base[1].lstrip('0').upper()}_{number}")
    rows, separators = _split(text, "rows")
    if separators:  # p=5, q=2; p=7, q=2
        return Node("list", tuple(Node("()", row.items) if row.kind == "list" else row for row in map(read, rows)))
    parts, separators = _split(text, "list")
    if separators:
        return _list(parts, separators)
    parts, signs = _split(text, "relation")
    if signs:
        return _relation(parts, signs)
    parts, signs = _split(text, "group")
    if signs:
        kind = _GROUPS[signs[-1]]
        earlier = text[: -len(parts[-1]) - len(signs[-1])]
        return Node(kind, (read(earlier), read(parts[-1])) if kind == "minus" else _all(parts))
    inner = _bracketed(text)
    if inner is not None:
        return _group(text, *inner)
    if _SIGNED.search(text):
        return Node("list", tuple(read(_signed(text, *both)) for both in ((" + ", " - "), (" - ", " + "))))
    first, *others = parts = _split(text, "ratio")[0]
    if others and all(part.strip()[:1].isupper() and is_name(part) for part in parts):
        return Node("value", text="ratio of " + re.sub("[^A-Za-z ]", "", " ".join(parts)))  # A:B = 1:2
    if len(others) > 1:
        return Node("ratio", tuple(Node("value", text=rf"\frac{{{other}}}{{{first}}}") for other in others))
    return Node("value", text=rf"\frac{{{first}}}{{{others[0]}}}" if others else text)


def _pointing_in(interval: re.Match[str]) -> str:
    left, inner, right = interval.groups()
    return ("[" if left == "[" else "(") + inner + ("]" if right == "]" else ")")


def named(node: Node) -> str | None:
    """Return the name whose value a relation states (`x` of `x = 5` and `x in S`), or None."""
    if not node.equation:
        return None
    first = node.items[0]
    items = first.items if first.kind == "()" else (first,)  # (p, q) = (3, 2)
    texts = ["".join(item.text.split()) for item in items if item.kind == "value" and is_name(item.text)]
    between = any(side.kind == "value" and is_name(side.text) for side in node.items[1:-1])
    return ",".join(texts) if len(texts) == len(items) and not between else None


def _all(parts: list[str]) -> tuple[Node, ...]:
    """Read each part. A part that is a list itself, as of `\\pm`, gives several items."""
    found: list[Node] = []
    for node in map(read, parts):
        found += node.items if node.kind == "list" else (node,)
    return tuple(found)


def _list(parts: list[str], separators: list[str]) -> Node:
    kinds = {"list" if sign == "," else "and" if sign.endswith(("and", "wedge")) else "or" for sign in separators}
    return Node(kinds.pop() if len(kinds) == 1 else "list", _all(parts))


def _relation(parts: list[str], signs: list[str]) -> Node:
    if r"\approx" in signs:  # the exact part counts: x = 1/3 \approx 0.33
        end = signs.index(r"\approx")
        if end == 0 and is_name(parts[0]):
            parts, signs = parts[:2], ["="]
        else:
            parts, signs = parts[: end + 1], signs[:end]
    sides = tuple(map(read, parts))
    if len(sides) == 2 and signs == ["="] and sides[1].kind == "value" and is_name(sides[1].text):  # 5 = x
        sides = sides if sides[0].kind == "value" and is_name(sides[0].text) else sides[::-1]
    return Node("relation", sides, tuple(_SIGNS.get(sign, sign) for sign in signs)) if signs else sides[0]


def _group(text: str, kind: str, content: str) -> Node:
    if kind == "set" and (builder := _BUILDER.fullmatch(content)):
        return read(builder[2])
    parts, separators = _split(content.replace(";", ","), "list")
    if not separators and kind != "set":
        inner = read(content)
        return Node("value", text=text) if inner.kind == "value" and kind == "()" else inner
    if kind == "braces":
        return read(content)
    return Node(kind, _all(parts) if content.strip() else ())


def _bracketed(text: str) -> tuple[str, str] | None:
    """Return the kind and the content of the brackets around an entire text."""
    stack, tokens = 0, list(_TOKEN.finditer(text))
    for index, token in enumerate(tokens):
        stack += bool(token["open"]) - bool(token["close"])
        if stack == 0 and index < len(tokens) - 1:
            return None
    kind = _PAIRS.get((tokens[0][0], tokens[-1][0])) if tokens and stack == 0 else None
    return (kind, text[tokens[0].end() : tokens[-1].start()]) if kind else None


def _split(text: str, kind: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text between the tokens of a kind outside every bracket, and these tokens."""
    parts, found, start, depth = [], [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0 and token[kind]:
            parts.append(text[start : token.start()])
            found.append(token[kind])
            start = token.end()
    return [*parts, text[start:]], found


def _ungrouped(text: str) -> str:
    """Drop the commas within numbers, if a space follows every other comma. The lone comma of (1,200) stays."""
    grouped = _THOUSANDS.search(text)
    if grouped is None:
        return text
    rest = _THOUSANDS.sub("", text)
    in_brackets = re.search(r"(?:[(\[]|\\\{|_\{)[^()\[\]{}]*$", text[: grouped.start()])
    if re.search(r",(?!\s)", rest) or ("," not in rest and in_brackets):
        return text
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def _signed(text: str, plus_minus: str, minus_plus: str) -> str:
    return _SIGNED.sub(lambda sign: plus_minus if sign[0][1] == "p" else minus_plus, text)
