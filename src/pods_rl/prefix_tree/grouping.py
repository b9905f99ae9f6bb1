"""The nodes of a tree of rows, and which rows share a pass: as few passes as a budget of tokens allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .tree import in_order_of_tokens


def divide_rows(
    rows: NDArray[np.int64], budget: int, *, least_passes: int = 1, most_passes: int | None = None
) -> list[list[int]]:
    """Return the rows of each pass, so that few passes have trees of at most `budget` nodes; the smallest tree first.

    Rows are taken in the order of their tokens, in which those with a long common prefix are neighbours, and cut into
    passes of neighbours. Of all such cuts into the same number of passes this one has the smallest largest tree.

    Args:
        rows: `[R, T]`, prompts on the left, completions on the right, -1 around them. A row of -1 has no node.
        budget: the most nodes of a tree, which are its distinct tokens. A longer row is alone in its pass.
        least_passes: another process may need this many, up to R.
        most_passes: if the budget needs more passes than these, the trees are larger. If None, it decides alone.

    >>> rows = np.array([[5, 6, 7], [8, 6, 7], [5, 6, 9], [8, 6, 9]])
    >>> divide_rows(rows, budget=3), divide_rows(rows, budget=99)
    ([[0, 2], [1, 3]], [[0, 2, 1, 3]])
    """
    in_order = in_order_of_tokens(rows)
    lengths, added = _nodes_of_neighbours(rows[in_order])
    passes = max(len(_cut(lengths, added, budget)), least_passes)
    if most_passes is not None:
        passes = min(passes, most_passes)
    # Search for the smallest budget that needs no more passes than these.
    low = 0
    high = int(lengths.sum())  # with this budget one range is enough
    while low < high:
        middle = (low + high) // 2
        if len(_cut(lengths, added, middle)) <= passes:
            high = middle
        else:
            low = middle + 1
    parts = _cut(lengths, added, low)
    nodes = [int(lengths[part.start] + added[part.start + 1 : part.stop].sum()) for part in parts]
    # Processes whose passes wait for each other then have trees of similar sizes at the same time. The order is stable,
    # so that every process and every run finds the same one.
    order = np.argsort(nodes, kind="stable")
    groups = [in_order[parts[number].start : parts[number].stop] for number in order]
    while len(groups) < least_passes:  # rows that are equal, or too few to compute
        largest = max(groups, key=len)
        groups.append(largest[len(largest) // 2 :])
        del largest[len(largest) // 2 :]
    return groups


def count_nodes(rows: NDArray[np.int64]) -> int:
    """Return the nodes of the tree of some rows, `[R, T]` as of `divide_rows`."""
    lengths, added = _nodes_of_neighbours(rows[in_order_of_tokens(rows)])
    return int(lengths[0] + added[1:].sum())


def distinct_share(completions_ids: Sequence[Sequence[int]], groups: Sequence[int]) -> float:
    """Return how many of the tokens that rows feed to the model are distinct prefixes: the work left in a tree.

    A completion's last token is not fed. Without any fed token the share is 1.

    >>> distinct_share([[5, 6, 7], [5, 6, 8], [5, 9, 9]], [0, 0, 0])  # 5, 5 6 and 5 9 of six
    0.5
    """
    fed = [max(0, len(ids) - 1) for ids in completions_ids]
    if sum(fed) == 0:
        return 1.0
    # After its group each fed token has a node, and rows of different groups share none.
    rows = np.full((len(fed), 1 + max(fed)), -1)
    for row, (group, ids) in enumerate(zip(groups, completions_ids, strict=True)):
        rows[row, 0] = group
        rows[row, 1 : 1 + fed[row]] = ids[: fed[row]]
    return count_nodes(rows) / sum(fed)


def _nodes_of_neighbours(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nodes of each row alone, and those that it adds to the tree of the rows before it, both `[R]`."""
    is_token = rows >= 0
    lengths = np.maximum(is_token.sum(1) - 1, 0)  # the last token predicts nothing and has no node
    first_columns = np.where(is_token.any(1), is_token.argmax(1), rows.shape[1])
    differ = rows[1:] != rows[:-1]  # [R - 1, T]
    parting = np.where(differ.any(1), differ.argmax(1), rows.shape[1] + 1)
    # Rows part one token before they differ, because a node is a token with the token after it.
    shared = np.clip(parting - 1 - first_columns[:-1], 0, lengths[1:])
    added = lengths.copy()
    added[1:] -= shared
    return lengths, added


def _cut(lengths: NDArray[np.int64], added: NDArray[np.int64], budget: int) -> list[range]:
    """Return the fewest ranges of neighbours whose trees have at most `budget` nodes each, or one row."""
    parts: list[range] = []
    start = 0
    nodes = 0
    for row, (alone, more) in enumerate(zip(lengths.tolist(), added.tolist(), strict=True)):
        if row > start and nodes + more > budget:
            parts.append(range(start, row))
            start = row
        nodes = alone if row == start else nodes + more
    if start < len(lengths):
        parts.append(range(start, len(lengths)))
    return parts
