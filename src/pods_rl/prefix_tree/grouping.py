"""Which rows share a micro-batch: those of one prompt, so that a tree shares what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from .tree import in_order_of_tokens

MOST_ROWS_TO_BALANCE = 2048
"""Rows whose common prefixes are compared pair by pair, in R x R numbers: 32 MB at this limit."""

MOST_ADDED = 0.01
"""The share of nodes that exchanges of rows between micro-batches may add to make their trees more alike."""


def group_rows(rows: NDArray[np.int64], size: int, computed: Sequence[bool] | None = None) -> list[list[int]]:
    """Return which rows form each micro-batch, so that all trees together have few nodes.

    Rows stand in the order of their tokens, in which those with a long common prefix are neighbours, and are cut into
    micro-batches of `size`. Rows that are not computed fill micro-batches of their own. Then the largest tree exchanges
    rows with others, as long as this makes it smaller and adds few nodes. The memory of a pass does not grow: if the
    largest tree still has more nodes than the largest of the micro-batches as they are given, these stay as they are.
    More than `MOST_ROWS_TO_BALANCE` rows are only sorted and cut.

    Args:
        rows: `[R, T]`, prompts on the left, completions on the right, -1 around them. As given, the first `size` rows
            are the first micro-batch, and so on.
        size: the rows of a micro-batch; R is a multiple of it.
        computed: which rows are; the others only fill micro-batches. If None, all.

    Returns:
        The numbers of the rows of each micro-batch, the smallest tree first: processes whose passes wait for each other
        then have trees of similar sizes at the same time.

    >>> group_rows(np.array([[5, 6, 7], [8, 6, 7], [5, 6, 9], [8, 6, 9]]), size=2)
    [[0, 2], [1, 3]]
    """
    given = [list(range(start, start + size)) for start in range(0, len(rows), size)]
    if computed is None:
        computed = [True] * len(rows)
    in_order = in_order_of_tokens(rows)
    left_out = [row for row in in_order if not computed[row]]
    packed = [row for row in in_order if computed[row]] + left_out
    grouped = [packed[start : start + size] for start in range(0, len(packed), size)]
    if len(rows) > MOST_ROWS_TO_BALANCE:
        return grouped[::-1]  # those that are not computed first
    trees = _Trees(rows, in_order)
    computed_members = [[row for row in members if computed[row]] for members in grouped]
    most_nodes = max(trees.nodes(members) for members in given)
    _balance(computed_members, most_nodes, trees)
    nodes = [trees.nodes(members) for members in computed_members]
    if max(nodes) > most_nodes:  # memory that was enough would no longer be
        return given
    complete = _fill(computed_members, left_out, size)
    # Stable, so that every process and every run finds one order.
    return [complete[number] for number in np.argsort(nodes, kind="stable")]


class _Trees:
    """Counts the nodes of the tree of any selection of rows.

    Args:
        rows: `[R, T]`, as `prefix_tree` gets them.
        in_order: their numbers in the order of their tokens.
    """

    def __init__(self, rows: NDArray[np.int64], in_order: list[int]) -> None:
        ordered = rows[in_order]  # [R, T]
        is_token = ordered >= 0
        first_columns = is_token.argmax(1)  # [R]
        self._lengths = np.maximum(is_token.sum(1) - 1, 0)  # [R], the last token has no node
        differ = ordered[1:] != ordered[:-1]  # [R - 1, T]
        parting = np.where(differ.any(1), differ.argmax(1), rows.shape[1] + 1)
        # Two rows part where the first of the neighbours between them part.
        self._shared = np.zeros((len(rows), len(rows)), np.int64)
        for number in range(len(rows) - 1):
            first_parting = np.minimum.accumulate(parting[number:])
            shared = np.clip(first_parting - 1 - first_columns[number], 0, self._lengths[number + 1 :])
            self._shared[number, number + 1 :] = shared
        self._rank = np.empty(len(rows), np.int64)
        self._rank[in_order] = np.arange(len(rows))

    def nodes(self, members: Sequence[int]) -> int:
        """Return the number of nodes of the tree of some rows."""
        ranks = np.sort(self._rank[list(members)])
        return int(self._lengths[ranks].sum() - self._shared[ranks[:-1], ranks[1:]].sum())

    def length(self, row: int) -> int:
        """Return the number of nodes of a row alone."""
        return int(self._lengths[self._rank[row]])


@dataclass(frozen=True)
class _Exchange:
    """Two micro-batches after they have exchanged a row.

    Args:
        partner: the number of the one that gives a short row; the other is the largest.
        largest_members: the rows of the largest afterwards.
        partner_members: the rows of the partner afterwards.
        largest_nodes: the nodes of the largest's tree afterwards.
        partner_nodes: the nodes of the partner's tree afterwards.
    """

    partner: int
    largest_members: list[int]
    partner_members: list[int]
    largest_nodes: int
    partner_nodes: int

    @property
    def worst(self) -> int:
        return max(self.largest_nodes, self.partner_nodes)


def _balance(groups: list[list[int]], most_nodes: int, trees: _Trees) -> None:
    """Exchange rows of the largest micro-batch, in place, while it becomes smaller.

    Args:
        groups: the rows of each micro-batch.
        most_nodes: up to this size of a tree an exchange may add nodes in all; above it memory comes first.
        trees: of their rows.
    """
    nodes = [trees.nodes(members) for members in groups]
    most_in_all = (1 + MOST_ADDED) * sum(nodes)
    for _ in range(4 * len(groups)):  # bounds the time
        largest = int(np.argmax(nodes))
        exchange = _best_exchange(groups, largest, trees)
        if exchange is None or exchange.worst >= nodes[largest]:
            return
        before = nodes[largest] + nodes[exchange.partner]
        in_all = sum(nodes) - before + exchange.largest_nodes + exchange.partner_nodes
        if nodes[largest] <= most_nodes and in_all > most_in_all:
            return
        groups[largest] = exchange.largest_members
        groups[exchange.partner] = exchange.partner_members
        nodes[largest] = exchange.largest_nodes
        nodes[exchange.partner] = exchange.partner_nodes


def _best_exchange(groups: list[list[int]], largest: int, trees: _Trees) -> _Exchange | None:
    """Return the exchange of the largest micro-batch's longest row for another's shortest that helps most."""
    best: _Exchange | None = None
    long_row = max(groups[largest], key=trees.length, default=None)
    if long_row is None:
        return None
    remaining = [row for row in groups[largest] if row != long_row]
    for number, members in enumerate(groups):
        if number == largest or not members:
            continue
        short_row = min(members, key=trees.length)
        largest_members = [*remaining, short_row]
        partner_members = [row for row in members if row != short_row]
        partner_members.append(long_row)
        exchange = _Exchange(
            number, largest_members, partner_members, trees.nodes(largest_members), trees.nodes(partner_members)
        )
        if best is None or exchange.worst < best.worst:
            best = exchange
    return best


def _fill(groups: list[list[int]], left_out: list[int], size: int) -> list[list[int]]:
    """Return the groups, each filled up to `size` rows with rows that are left out."""
    remaining = iter(left_out)
    return [members + list(islice(remaining, size - len(members))) for members in groups]
