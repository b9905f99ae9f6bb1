r"""Read what an answer is made of: a list, a set, a tuple, an interval, a relation, or one expression.

A text is split at the separators, relation signs and brackets outside every bracket. `values.value` evaluates the
expressions.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any, NamedTuple

from .bounds import split_bound
from .names import is_name
from .words import WORDS_THAT_CHANGE_A_NUMBER, may_change

MAX_SIGNED = 3  # coordinates of a point with signs of their own
BRACKETS = ("()", "[]", "(]", "[)")


class Node(NamedTuple):
    """An expression ("value": its text), a chain of sides with signs ("relation"), or a group of answers.

    An "approximation" is an exact part and its roundings. A group is a "list", a list joined by "and" or "or", a "set",
    "union", "minus", "ratio", or a pair of brackets.
    """

    kind: str
    items: tuple[Any, ...] = ()
    signs: tuple[str, ...] = ()
    text: str = ""

    @property
    def equation(self) -> bool:
        return self.kind == "relation" and set(self.signs) <= {"=", "in"}

    @property
    def names_one(self) -> bool:
        """Whether this is the name of one quantity, such as `x`."""
        return self.kind == "value" and is_name(self.text)


_TOKEN = re.compile(
    r"(?P<open>\\\{|\\(?:langle|lfloor|lceil|begin)(?![a-z])|[({\[])"
    r"|(?P<close>\\\}|\\(?:rangle|rfloor|rceil|end)(?![a-z])|[)}\]])"
    r"|(?P<list>(?:[,;]\s*)?(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:land|lor|wedge|vee)(?![a-z]))|,)|(?P<rows>;)"
    r"|(?P<relation>\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|in|approx)(?![a-z])|:=|<=|>=|!=|=|<|>)"
    r"|(?P<group>\\(?:cup|cap|setminus|backslash)(?![a-z]))"
    r"|(?P<ratio>:|(?<![A-Za-z\\])to(?![A-Za-z]))"
    r"|\\[A-Za-z]+|.",
    re.DOTALL,
)
_RELATIONS = {
    r"\leq": "<=", r"\le": "<=", r"\leqslant": "<=", r"\geq": ">=", r"\ge": ">=", r"\geqslant": ">=",
    r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\neq": "!=", r"\in": "in", ":=": "=",
}  # fmt: skip
_PAIRS = {
    ("(", ")"): "()", ("[", "]"): "[]", ("(", "]"): "(]", ("[", ")"): "[)",
    (r"\{", r"\}"): "set", (r"\langle", r"\rangle"): "()", ("{", "}"): "braces",
}  # fmt: skip
_OPERATIONS_ON_SETS = {r"\cup": "union", r"\cap": "cap", r"\setminus": "minus", r"\backslash": "minus"}
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_IN_BASE = re.compile(  # 101_2, 101_{two}
    r"\(?\s*([0-9][0-9A-Fa-f]*)\s*\)?\s*_\s*\{?\s*\(?([0-9]+|" + "|".join(_BASES) + r")\)?\s*\}?"
)
_IN_THOUSANDS = re.compile(r"(?<![0-9.,_^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")  # 1,200
_OPEN_BRACKET = re.compile(r"(?:[(\[]|\\\{|_\{)[^()\[\]{}]*$")  # before the number of (1,200)
_BUILDER = re.compile(
    r"\s*([^,:|]*?)\s*(?:\\mid|:|\|)\s*(.*[<>=].*|.*\\(?:le|ge|lt|gt|ne).*)", re.DOTALL
)  # x \mid x > 2
_NAMED_NUMBER = re.compile(  # max 5, Tom: 5, Ann has 7
    r"([A-Za-z]{2,}(?:[ '-][A-Za-z]+){0,3}?)\s*(?:\s(?:is|are|has|have|had|gets?|got)|:)?\s*"
    r"(?=[-+]?[0-9.]|[-+]?\\[dt]?frac)(.+)"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-z])")
_INTERVAL = re.compile(r"([\](\[])([^\[\]()]*,[^\[\]()]*)([\[\])])")  # also ]2, 5[
_ROWS = re.compile(  # of a system: \begin{cases} x = 3 \\ y = 2 \end{cases}
    r"(?:\\\{)?\s*\\begin\s*\{(?:cases|aligned|align\*?|gathered|array|split)\}(?:\s*\{[lcr| ]*\})?(.*)"
    r"\\end\s*\{[a-z]+\*?\}\s*",
    re.DOTALL,
)
_POINT = re.compile(r"[ABD-OQ-Z]\s*=?\s*(\((?:[-+0-9.,;/ ]|\\frac|\\sqrt|[{}])+\))")  # A(2, 3)


def structure(text: str) -> Node:
    """Return the structure of a `plain` text."""
    text = _without_thousands_commas(_without_rows(text))
    return _read(_INTERVAL.sub(_pointing_in, text))


def named(node: Node) -> str | None:
    """Return the name whose value a relation states (`x` of `x = 5` and `x in S`), or None."""
    if not node.equation:
        return None
    first, *between, _ = node.items
    items = first.items if first.kind == "()" else (first,)  # (p, q) = (3, 2)
    if not all(item.names_one for item in items) or any(side.names_one for side in between):
        return None
    return ",".join("".join(item.text.split()) for item in items)


def _without_thousands_commas(text: str) -> str:
    """Drop the commas within numbers, if a space follows every other comma. The lone comma of (1,200) stays."""
    number = _IN_THOUSANDS.search(text)
    if number is None:
        return text
    rest = _IN_THOUSANDS.sub("", text)
    if re.search(r",(?!\s)", rest):
        return text
    if "," not in rest and _OPEN_BRACKET.search(text[: number.start()]):
        return text
    return _IN_THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def _without_rows(text: str) -> str:
    """Write the rows of a system of equations as a list; the cases of a function stay."""
    system = _ROWS.fullmatch(text.strip())
    if system is None:
        return text
    rows = [row.strip(" ,;") for row in re.split(r"\\\\(?:\[[^\]]*\])?", system[1])]
    rows = [row.replace("&", " ") for row in rows if row]
    if not all(re.search(r"[=<>]|\\(?:le|ge|ne|in)(?![a-z])|\\[lg]eq", row) for row in rows):
        return text
    return ", ".join(rows)


def _pointing_in(interval: re.Match[str]) -> str:
    """Write the brackets of an open interval as parentheses: `(2, 5)` for `]2, 5[`."""
    left, inner, right = interval.groups()
    opening = "[" if left == "[" else "("
    closing = "]" if right == "]" else ")"
    return opening + inner + closing


def _read(text: str) -> Node:
    """Return the structure of a text whose commas separate items and whose brackets point inwards."""
    text = text.strip()
    point = _POINT.fullmatch(text)
    if point:
        text = point[1]
    numeral = _IN_BASE.fullmatch(text)
    if numeral:
        digits, base = numeral.groups()
        if base.isalpha():
            base = str(_BASES.index(base) + 2)
        return Node("base", text=f"{digits.lstrip('0').upper()}_{base}")
    # the loosest separator first: rows, lists, relations, sets
    parts, separators = _split(text, "rows")
    if separators:  # p=5, q=2; p=7, q=2
        return Node("list", tuple(map(_row, parts)))
    parts, separators = _split(text, "list")
    if separators:
        return Node(_kind_of_list(separators), _read_all(parts))
    parts, signs = _split(text, "relation")
    if signs:
        return _relation(parts, signs)
    parts, signs = _split(text, "group")
    if signs:
        return _operation(text, parts, signs)
    bracketed = _bracketed(text)
    if bracketed is not None:
        return _group(text, *bracketed)
    if _PLUS_MINUS.search(text):
        return Node("list", tuple(map(_read, _both(text))))
    return _ratio(text)


def _row(text: str) -> Node:
    row = _item(text)
    return Node("()", row.items) if row.kind == "list" else row


def _kind_of_list(separators: list[str]) -> str:
    """Return "and" or "or" if every separator is that word or sign, else "list"."""
    kinds = set()
    for sign in separators:
        if sign == ",":
            kinds.add("list")
        elif sign.endswith(("and", "wedge")):
            kinds.add("and")
        else:
            kinds.add("or")
    return kinds.pop() if len(kinds) == 1 else "list"


def _read_all(parts: list[str]) -> tuple[Node, ...]:
    r"""Read each part. A part that is a list itself, as of `\pm`, gives several items."""
    items: list[Node] = []
    for part in parts:
        node = _item(part)
        if node.kind == "list":
            items.extend(node.items)
        else:
            items.append(node)
    return tuple(items)


def _item(text: str) -> Node:
    """Read an item of a list. Words before a number name it: `max 5` is read as `max = 5`."""
    labelled = _NAMED_NUMBER.fullmatch(text.strip())
    if labelled is None:
        return _read(text)
    words = labelled[1]
    if may_change(words.split(), WORDS_THAT_CHANGE_A_NUMBER) or split_bound(words, "") != ("", words, ""):
        return _read(text)
    name = words if is_name(words) else f"name {words}"  # Al, which is a name only here
    return Node("relation", (Node("value", text=name), _read(labelled[2])), ("=",))


def _relation(parts: list[str], signs: list[str]) -> Node:
    if r"\approx" in signs:  # x = 1/3 \approx 0.33
        end = signs.index(r"\approx")
        if end > 0 or not is_name(parts[0]):
            exact = _relation(parts[: end + 1], signs[:end])
            return Node("approximation", (exact, *map(_read, parts[end + 1 :])))
        parts = parts[:2]
        signs = ["="]
    sides = tuple(map(_read, parts))
    if not signs:
        return sides[0]
    if signs == ["="] and sides[1].names_one and not sides[0].names_one:  # 5 = x
        sides = sides[::-1]
    return Node("relation", sides, tuple(_RELATIONS.get(sign, sign) for sign in signs))


def _operation(text: str, parts: list[str], signs: list[str]) -> Node:
    """Read unions, intersections and differences of sets, of which the last decides."""
    kind = _OPERATIONS_ON_SETS[signs[-1]]
    if kind != "minus":
        return Node(kind, _read_all(parts))
    subtracted = parts[-1]
    earlier = text[: -len(subtracted) - len(signs[-1])]
    return Node(kind, (_read(earlier), _read(subtracted)))


def _bracketed(text: str) -> tuple[str, str] | None:
    """Return the kind and the content of the brackets around an entire text."""
    depth = 0
    tokens = list(_TOKEN.finditer(text))
    for index, token in enumerate(tokens):
        depth += _depth_change(token)
        if depth == 0 and index < len(tokens) - 1:
            return None
    if not tokens or depth != 0:
        return None
    first = tokens[0]
    last = tokens[-1]
    kind = _PAIRS.get((first[0], last[0]))
    if kind is None:
        return None
    return kind, text[first.end() : last.start()]


def _group(text: str, kind: str, content: str) -> Node:
    points = _points(content) if kind == "()" and _PLUS_MINUS.search(content) else []
    if points:
        return Node("list", tuple(map(_read, points)))
    builder = _BUILDER.fullmatch(content) if kind == "set" else None
    element, condition = builder.groups() if builder else ("", "")
    name, _, _ = element.partition(r"\in")
    if is_name(name) and len(name.split()) == 1:  # \{x \mid x > 2\}, \{x \in \mathbb{Z} \mid x > 2\}
        return _read(rf"{element} \land {condition}" if r"\in" in element else condition)
    parts, separators = _split(content.replace(";", ","), "list")
    if not separators and kind != "set":
        inner = _read(content)
        if inner.kind == "value" and kind == "()":
            return Node("value", text=text)
        return inner
    if kind == "braces":
        return _read(content)
    if not content.strip():
        return Node(kind)
    return Node(kind, _read_all(parts))


def _points(content: str) -> list[str]:
    r"""Return the points of a tuple with `\pm`, or nothing if it has one item.

    Coordinates that begin with `\pm` have signs of their own, others the same: `(1 \pm a, 2 \pm a)` is two points.
    """
    parts, separators = _split(content, "list")
    signed = [part for part in parts if _PLUS_MINUS.search(part)]
    if not separators or len(signed) > MAX_SIGNED:
        return []
    if len(signed) > 1 and all(re.match(r"\s*\\pm", part) for part in signed):
        choices = [[part] if part not in signed else list(_both(part)) for part in parts]
        return [f"({','.join(choice)})" for choice in product(*choices)]
    return [f"({point})" for point in _both(content)]


def _both(text: str) -> tuple[str, str]:
    r"""Return a text with the upper and with the lower sign of each `\pm` and `\mp`."""
    upper = _PLUS_MINUS.sub(lambda sign: " + " if sign[0] == r"\pm" else " - ", text)
    lower = _PLUS_MINUS.sub(lambda sign: " - " if sign[0] == r"\pm" else " + ", text)
    return upper, lower


def _ratio(text: str) -> Node:
    """Read a ratio, `2:3` or `2 to 3:4`, as its quotients; any other text is an expression."""
    parts, separators = _split(text, "ratio")
    if not separators:
        return Node("value", text=text)
    if all(part.strip()[:1].isupper() and is_name(part) for part in parts):
        return Node("value", text="ratio of " + re.sub("[^A-Za-z ]", "", " ".join(parts)))  # A:B = 1:2
    first, *others = parts
    if len(others) == 1:
        return Node("value", text=rf"\frac{{{first}}}{{{others[0]}}}")
    return Node("ratio", tuple(Node("value", text=rf"\frac{{{part}}}{{{first}}}") for part in others))


def _split(text: str, kind: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text between the tokens of a kind outside every bracket, and these tokens."""
    parts = []
    separators = []
    start = 0
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += _depth_change(token)
        if depth == 0 and token[kind]:
            parts.append(text[start : token.start()])
            separators.append(token[kind])
            start = token.end()
    parts.append(text[start:])
    return parts, separators


def _depth_change(token: re.Match[str]) -> int:
    if token["open"]:
        return 1
    if token["close"]:
        return -1
    return 0
