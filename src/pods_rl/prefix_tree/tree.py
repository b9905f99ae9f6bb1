"""The prefix tree of some rows of tokens, laid out as one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Branch:
    """The part of a row that no row before it has, with the way to it from the root.

    Args:
        path: the nodes of the row, from the root to its end.
        new: how many of them, the last ones, are new; they stand side by side in the sequence.
        same_prompt: whether the branch before is of the same prompt.
    """

    path: NDArray[np.int64]
    new: int
    same_prompt: bool


@dataclass(frozen=True)
class PrefixTree:
    """The distinct prefixes of some rows in depth-first order, so that each row's new nodes stand side by side.

    A node is a token together with the token after it. So each node has one label, and rows part one token before
    they differ. A row's last token predicts nothing and has no node.

    Args:
        tokens: of the nodes, `[L]`.
        labels: the tokens after them, `[L]`.
        columns: where the nodes stand in their rows, `[L]`.
        nodes: `[B, T - 1]`, the node of each column of each row; -1 where there is none, and in rows not asked for.
        branches: the rows that have a node of their own, in the order of the sequence.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    columns: NDArray[np.int64]
    nodes: NDArray[np.int64]
    branches: list[Branch]


def prefix_tree(rows: NDArray[np.int64], prompt_width: int, chosen: list[int] | None = None) -> PrefixTree:
    """Return the tree of some rows, in a time that is linear in their tokens.

    Rows share a node only in the same column, so prompts of different lengths, which begin in different columns, share
    nothing: a node's position is that of all its rows.

    Args:
        rows: `[B, T]`, prompts on the left, completions on the right, -1 around them; each has two tokens at least.
        prompt_width: columns of the prompts.
        chosen: the rows that count; None: all.

    Example:
        >>> tree = prefix_tree(np.array([[5, 6, 7, 8], [5, 6, 7, 9], [-1, 6, 7, 8]]), prompt_width=2)
        >>> tree.tokens.tolist(), tree.labels.tolist(), tree.columns.tolist()
        ([6, 7, 5, 6, 7, 7], [7, 8, 6, 7, 8, 9], [1, 2, 0, 1, 2, 2])
        >>> tree.nodes.tolist()
        [[2, 3, 4], [2, 3, 5], [-1, 0, 1]]
    """
    sortable = (rows + 1).astype(">u4")  # big-endian, so that the order of bytes is that of tokens
    order = sorted(range(len(rows)) if chosen is None else chosen, key=lambda row: sortable[row].tobytes())
    nodes = np.full((len(rows), rows.shape[1] - 1), -1)
    real = rows >= 0
    starts, ends = real.argmax(1), rows.shape[1] - real[:, ::-1].argmax(1) - 1
    sources, branches, count, before = [], [], 0, None
    for row in order:
        start, end = int(starts[row]), int(ends[row])
        first, same_prompt = start, False
        if before is not None:
            differ = rows[row] != rows[before]
            at = int(differ.argmax()) if differ.any() else end + 1
            same_prompt = at >= prompt_width
            first = max(start, at - 1)
            nodes[row, start:first] = nodes[before, start:first]
        new = max(end - first, 0)
        if new:
            nodes[row, first:end] = np.arange(count, count + new)
            sources.append((row, first, end))
            branches.append(Branch(nodes[row, start:end], new, same_prompt))
            count += new
        before = row
    columns = np.concatenate([np.arange(first, end) for _, first, end in sources])
    owners = np.repeat([row for row, *_ in sources], [end - first for _, first, end in sources])
    return PrefixTree(rows[owners, columns], rows[owners, columns + 1], columns, nodes, branches)


def distinct_share(completions_ids: Sequence[Sequence[int]], groups: Sequence[int]) -> float:
    """Return how many of the tokens that rows feed to the model are distinct prefixes: the work left in a tree.

    A completion's last token is not fed. Without any fed token the share is 1.

    Args:
        completions_ids: tokens of each completion.
        groups: the prompt of each completion, a number.

    >>> distinct_share([[5, 6, 7], [5, 6, 8], [5, 9, 9]], [0, 0, 0])  # 5, 5 6 and 5 9 of six
    0.5
    """
    nodes: dict[tuple[int, int], int] = {}  # by parent, or prompt, and token
    for group, ids in zip(groups, completions_ids, strict=True):
        node = -1 - group
        for token in ids[:-1]:
            node = nodes.setdefault((node, token), len(nodes))
    fed = sum(max(0, len(ids) - 1) for ids in completions_ids)
    return len(nodes) / fed if fed else 1.0
