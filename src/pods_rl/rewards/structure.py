r"""Parse the structure of an answer: lists, sets, tuples, intervals and relations, around expressions.

An answer is split at the separators, relation signs and brackets outside every bracket; the rest are expressions
(`equality.value` evaluates them). Nothing is evaluated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    r"|(?P<list>(?:[,;]\s*)?(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:land|lor|wedge|vee)(?![a-z]))|[,;])"
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
_THOUSANDS = re.compile(r"(?<![0-9.,_^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
_ARGUMENT = re.compile(rf"(?<=[A-Za-z\]}}^]\{{){_THOUSANDS.pattern}(?=\}})")  # \sqrt{1,000}
_BUILDER = re.compile(r"\s*([^,:|]*?)\s*(?:\\mid|:|\|)\s*(.*[<>=].*|.*\\(?:le|ge|lt|gt|ne).*)", re.DOTALL)
_SIGNED = re.compile(r"\\(?:pm|mp)(?![a-z])")
_OUTWARD = re.compile(r"(\])([^\[\]]*,[^\[\]]*)([\[\])])|([\[(])([^\[\]()]*,[^\[\]()]*)(\[)")  # ]2, 5[
_POINT = re.compile(r"[ABD-OQ-Z]\s*=?\s*(\((?:[-+0-9.,;/ ]|\\frac|\\sqrt|[{}])+\))")  # A(2, 3)


def read(text: str) -> Node:
    r"""Read the structure of a `plain` text.

    >>> read(r"x < 3").signs, read("1, 2 and 3").kind, read(r"\{1, 2\}").kind, read("[0,1)").kind, read("2x+1").text
    (('<',), 'list', 'set', '[)', '2x+1')
    """
    if point := _POINT.fullmatch(text.strip()):
        text = point[1]
    text = _OUTWARD.sub(_inward, text)
    text = _ungrouped(_ARGUMENT.sub(lambda match: match[0].replace(",", ""), text.strip()), alone=True)
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
    parts, separators = _split(text, "ratio")
    return Node("ratio", _all(parts)) if separators else Node("value", text=text)


def _inward(interval: re.Match[str]) -> str:
    left, inner, right = interval.groups()[:3] if interval[1] else interval.groups()[3:]
    return f"{'(' if left == ']' else left}{inner}{')' if right == '[' else right}"


def named(node: Node) -> str | None:
    """Return the name whose value a relation states (`x` of `x = 5` and `x in S`), or None."""
    if not node.equation:
        return None
    first = node.items[0]
    items = first.items if first.kind in ("()", "ratio") else (first,)  # (p, q) = (3, 2)
    texts = ["".join(item.text.split()) for item in items if item.kind == "value" and is_name(item.text)]
    if first.kind == "ratio" and not all(text[0].isupper() for text in texts):  # A:B = 1:2
        return None
    between = any(side.kind == "value" and is_name(side.text) for side in node.items[1:-1])
    return ",".join(texts) if len(texts) == len(items) and not between else None


def _all(parts: list[str]) -> tuple[Node, ...]:
    """Read each part. A part that is a list itself, as of `\\pm`, gives several items."""
    found: list[Node] = []
    for node in map(read, parts):
        found += node.items if node.kind == "list" else (node,)
    return tuple(found)


def _list(parts: list[str], separators: list[str]) -> Node:
    if ";" in separators and set(separators) > {";"}:  # p=5, q=2; p=7, q=2
        groups, start = [], 0
        for end in [i for i, sign in enumerate(separators) if sign == ";"] + [len(separators)]:
            items = _all(parts[start : end + 1])
            groups.append(items[0] if len(items) == 1 else Node("()", items))
            start = end + 1
        return Node("list", tuple(groups))
    if not parts[-1].strip():  # a comma at the end
        parts = parts[:-1]
    kinds = {
        "and" if sign.endswith(("and", "land", "wedge")) else "or" if sign not in ",;" else "" for sign in separators
    }
    return Node(kinds.pop() or "list" if len(kinds) == 1 else "list", _all(parts))


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
    content = _ungrouped(content, alone=kind == "braces")
    parts, separators = _split(content, "list")
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
    parts, found, start = [], [], 0
    for token in _outside(text):
        if token[kind]:
            parts.append(text[start : token.start()])
            found.append(token[kind])
            start = token.end()
    return [*parts, text[start:]], found


def _outside(text: str) -> Iterator[re.Match[str]]:
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0 and not token["close"]:
            yield token


def _ungrouped(text: str, *, alone: bool) -> str:
    """Drop the commas within numbers outside brackets: if a space follows every other comma, or `alone`.

    `alone` decides if there is no other comma: 1,200 is a number, and (1,200) a point.
    """
    commas = {token.start() for token in _outside(text) if token[0] == ","} if "," in text else set()
    grouped = [found for found in _THOUSANDS.finditer(text) if found.start() + found[0].index(",") in commas]
    within = {index for found in grouped for index in range(*found.span())}
    others = commas - within
    if not (all(text[index + 1 : index + 2].isspace() for index in others) if others else alone):
        return text
    return "".join(sign for index, sign in enumerate(text) if index not in commas & within)


def _signed(text: str, plus_minus: str, minus_plus: str) -> str:
    return _SIGNED.sub(lambda sign: plus_minus if sign[0][1] == "p" else minus_plus, text)
