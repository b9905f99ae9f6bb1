r"""Compare assignments by name wherever they meet a tuple of names: `y = 2, x = 3` is `(x, y) = (3, 2)`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .structure import Node, named

# Orders in which coordinates are listed other than the alphabet's; a bare tuple has no names.
_ORDERS = (
    (r"r", r"\theta"), (r"\rho", r"\theta"), (r"r", r"\theta", "z"), (r"\rho", r"\theta", r"\phi"),
    (r"r", r"\theta", r"\phi"), (r"r", r"\phi"), (r"\alpha", r"\beta"), (r"\alpha", r"\beta", r"\gamma"),
    ("x", "y", "z", "w"), ("x", "y", "z", "t"), ("h", "k"), (r"\mu", r"\sigma"),
)  # fmt: skip
_SUBSCRIPT = re.compile(r"([A-Za-z]|\\[a-z]+)_\{?([0-9]+)\}?")


def assignments(node: Node) -> dict[str, Node] | None:
    r"""Return the value of each name, in the order written, or None unless a node only assigns different names.

    >>> from .structure import structure
    >>> [list(assignments(structure(text))) for text in ("y=2, x=3", "(x,y)=(3,2)", r"x_{1}=3 \land x_2=2")]
    [['y', 'x'], ['x', 'y'], ['x_1', 'x_2']]
    >>> assignments(structure("x=2, x=3")) is None, assignments(structure("(3,2)")) is None
    (True, True)
    """
    names: list[str] = []
    values: list[Node] = []
    if node.kind == "relation":
        name = named(node)
        sides = (node.items[0], node.items[-1])
        if name is None or "in" in node.signs or len(node.items) != 2:
            return None
        if any(side.kind != "()" for side in sides) or len(sides[0].items) != len(sides[1].items):
            return None
        names = name.split(",")
        values = list(sides[1].items)
    elif node.kind in ("list", "and", "()", "set"):
        for item in node.items:
            name = named(item)
            if name is None or "," in name or "in" in item.signs or item.items[-1].kind != "value":
                return None
            names.append(name)
            values.append(item.items[-1])
    found = {_in_one_spelling(name): value for name, value in zip(names, values, strict=True)}
    if len(found) < 2 or len(found) < len(names):
        return None
    return found


def _in_one_spelling(name: str) -> str:
    name = re.sub(r"[{}\s]", "", name).replace(r"\varphi", r"\phi").replace(r"\vartheta", r"\theta")
    return name.casefold() if len(name) > 2 and name.istitle() else name  # Mean


def in_order(values: Mapping[str, Node]) -> Sequence[Node] | None:
    r"""Return the values as a tuple without names lists them, or None if the names have no order of their own.

    That is the order of the alphabet for letters next to each other (`x, y, z`; `a, b`) and of numbers for `x_1, x_2`.

    >>> from .structure import structure
    >>> [value.text for value in in_order(assignments(structure("y=2, x=3")))]
    ['3', '2']
    >>> in_order(assignments(structure("m=2, b=3"))) is None
    True
    """
    names = list(values)
    for order in _ORDERS:
        if set(order) == set(names):
            return [values[name] for name in order]
    if all(map(_SUBSCRIPT.fullmatch, names)) and len({_SUBSCRIPT.sub(r"\1", name) for name in names}) == 1:
        return [values[name] for name in sorted(names, key=lambda name: int(_SUBSCRIPT.sub(r"\2", name)))]
    ordered = sorted(names)
    first = ordered[0]
    if len(first) != 1 or ordered != [chr(ord(first) + i) for i in range(len(names))]:
        return None
    return [values[name] for name in ordered]
