"""The nodes of a tree as blocks: rows of nodes of which one call computes the attention.

Rows of similar length are gathered and padded on the right. What rows share is either in front of each of them (the
`trunk` of a block), or left out of them: then a block of its own has all nodes after it as one row that sees nothing
else, no call needs a mask, and `merged` joins the results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tree import Branch, by_prompt, common_nodes

SPREAD = 2  # rows of one block differ in length by at most this factor
DENSE = 512  # a tree of at most this many nodes is one call under a mask, if it needs half of the pairs of nodes
LONG = 256  # nodes; longer rows are not padded, and what they share is computed apart from them
SHARED = 32  # nodes that all rows share, from which a call for them is quicker than to repeat them in each row

NodeIndex = slice | Tensor  # numbers of nodes; those that stand side by side as a slice, which copies nothing
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Rows of nodes that have the same nodes before them: a node attends to the trunk and in its row."""

    trunk: Numbers
    rows: list[Numbers]
    distance_to_key: Tensor | None = None  # as in `Block`


@dataclass(frozen=True)
class Block:
    """Rows of nodes that one call computes: each node attends to the `trunk`, which all rows have, and in its row."""

    trunk: NodeIndex | None
    rows: NodeIndex  # [count * width], the node of each slot; a shorter row repeats its last node at its end
    count: int
    width: int
    key_count: int  # how many nodes each row of queries is compared with: the trunk and the row
    # [width, keys], how many nodes each key is before a node on its path, below 0 if it is not on it. If None, each row
    # is a path.
    distance_to_key: Tensor | None = None
    counted: Tensor | None = None  # [count * width, 1, 1], whether a slot counts for its node. If None, each does
    sees_row: bool = True  # whether a node sees its row. If not, it sees the trunk only

    def queries(self, q: Tensor, fold: int) -> Tensor:
        """Return `[count, H / fold, width * fold, D]` of queries `[L, H, D]`: `fold` heads become one."""
        return self.folded(take(q, self.rows), fold)

    def folded(self, rows: Tensor, fold: int) -> Tensor:
        """Return `[count, H / fold, width * fold, D]` of what each slot has, `[count * width, H, D]`."""
        heads = rows.unflatten(0, (self.count, self.width)).unflatten(2, (-1, fold))
        return heads.transpose(1, 2).flatten(2, 3)

    def keys(self, states: Tensor) -> Tensor:
        """Return the keys or values `[count, K, trunk + width, D]` of `states` `[L, K, D]`."""
        if not self.sees_row:
            assert self.trunk is not None
            return take(states, self.trunk).transpose(0, 1).expand(self.count, -1, -1, -1)
        rows = take_shared(states, self.rows).unflatten(0, (self.count, self.width)).transpose(1, 2)
        if self.trunk is None:
            return rows  # [count, K, width, D]
        trunk = take(states, self.trunk).transpose(0, 1)  # [K, trunk, D]
        return torch.cat([trunk.expand(self.count, -1, -1, -1), rows], 2)

    def by_slot(self, outputs: Tensor, fold: int) -> Tensor:
        """Return the outputs `[count * width, H, D]` of those of the `queries`."""
        heads = outputs.unflatten(2, (-1, fold))  # [count, H / fold, width, fold, D]
        return heads.transpose(1, 2).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True)
class Layout:
    """Blocks in which each node of a tree has a slot."""

    blocks: list[Block]  # in which each node sees its row
    spans: list[Block]  # of what is left out of these rows
    slot_of_node: NodeIndex  # among the rows of all blocks
    repeats: Tensor  # the slots of nodes that have another slot, which counts; without those that fill a row
    repeated: Tensor  # the nodes of these slots


def lay_out(branches: list[Branch], nodes: int, device: torch.device, spans: bool) -> Layout:
    """Return the blocks of a tree with this number of nodes.

    Args:
        branches: of the tree; those of one prompt follow each other.
        spans: whether nodes that all rows of a prompt share are left out of long ones.
    """
    parts: list[Part] = []
    long_rows: list[Numbers] = []
    shared: list[tuple[Numbers, Numbers]] = []
    trunks: list[Numbers] = []
    for of_prompt in by_prompt(branches):
        paths = [branch.path for branch in of_prompt]
        trunk = common_nodes(of_prompt)
        numbers = np.unique(np.concatenate(paths))
        pairs_by_rows = trunk**2 + sum(len(path) * (len(path) - trunk) for path in paths)
        # One row under a mask: twice as many pairs in one call still take less time than several calls.
        if len(paths) > 1 and len(numbers) <= DENSE and len(numbers) ** 2 <= 2 * pairs_by_rows:
            # How many nodes each key is before a node on its path, -1 if it is not on it, [nodes, nodes].
            distance = np.full((len(numbers), len(numbers)), -1)
            for path in paths:
                columns = np.searchsorted(numbers, path)
                depth = np.arange(len(path))
                distance[np.ix_(columns, columns)] = depth[:, None] - depth
            parts.append(Part(_NONE, [numbers], torch.from_numpy(distance).to(device)))
        elif spans and max(map(len, paths)) - trunk > LONG:
            start = trunk if trunk >= SHARED else 0
            if start:
                after = [paths[0][start:], *(branch.path[-branch.new :] for branch in of_prompt[1:])]
                shared.append((paths[0][:start], np.concatenate(after)))
                long_rows.append(paths[0][:start])
            long_rows += [path[start:] for path in paths]
        else:
            trunks.append(paths[0][:trunk])
            parts.append(Part(paths[0][:trunk], [path[trunk:] for path in paths]))
    parts = [Part(_NONE, trunks + long_rows), *parts]
    return _as_blocks(parts, shared, nodes, device)


_NONE = np.empty(0, np.int64)


def _as_blocks(parts: list[Part], shared: list[tuple[Numbers, Numbers]], nodes: int, device: torch.device) -> Layout:
    blocks: list[Block] = []
    slot_of_node = np.empty(nodes, np.int64)
    of_block: list[tuple[Numbers, Numbers]] = []  # the node of each slot, and whether the slot fills a row
    first_slot = 0  # of the next row
    for part in parts:
        trunk = _node_index(part.trunk, device) if len(part.trunk) else None
        for rows in _rows_of_similar_length(part.rows):
            width = max(map(len, rows))
            padded = []
            fills = []
            for row in rows:
                slot_of_node[row] = np.arange(first_slot, first_slot + len(row))
                first_slot += width
                padded.append(row[np.minimum(np.arange(width), len(row) - 1)])
                fills.append(np.arange(width) >= len(row))
            numbers = np.concatenate(padded)
            of_block.append((numbers, np.concatenate(fills)))
            key_count = len(part.trunk) + width
            nodes_of_rows = _node_index(numbers, device)
            blocks.append(Block(trunk, nodes_of_rows, len(rows), width, key_count, part.distance_to_key))
    repeats: list[Numbers] = []
    repeated: list[Numbers] = []
    first_slot = 0
    for i, (numbers, fill) in enumerate(of_block):
        slots = np.arange(first_slot, first_slot + len(numbers))
        first_slot += len(numbers)
        counts = slot_of_node[numbers] == slots
        if counts.all():
            continue
        counted = torch.from_numpy(counts).to(device).view(-1, 1, 1)
        blocks[i] = replace(blocks[i], counted=counted)
        repeats.append(slots[~counts & ~fill])
        repeated.append(numbers[~counts & ~fill])
    spans = [
        Block(_node_index(before, device), _node_index(after, device), 1, len(after), len(before), sees_row=False)
        for before, after in shared
    ]
    return Layout(
        blocks,
        spans,
        _node_index(slot_of_node, device),
        torch.from_numpy(np.concatenate([_NONE, *repeats])).to(device),
        torch.from_numpy(np.concatenate([_NONE, *repeated])).to(device),
    )


def _node_index(numbers: Numbers, device: torch.device) -> NodeIndex:
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers).to(device)


def _rows_of_similar_length(rows: list[Numbers]) -> list[list[Numbers]]:
    """Return the rows that are not empty in groups of similar length, all in the order of their first nodes."""
    filled = [row for row in rows if len(row)]
    groups: list[list[Numbers]] = []
    for row in sorted(filled, key=len, reverse=True):
        longest = len(groups[-1][0]) if groups else 0
        least = longest if longest > LONG else longest / SPREAD  # long rows are not padded
        if groups and len(row) >= least:
            groups[-1].append(row)
        else:
            groups.append([row])
    # In the order of the nodes, rows that are not padded are a slice.
    in_order = [sorted(group, key=_first_node) for group in groups]
    return sorted(in_order, key=lambda group: _first_node(group[0]))


def _first_node(row: Numbers) -> int:
    return int(row[0])


# -- nodes and heads -----------------------------------------------------------------------------------------------


def take(states: Tensor, nodes: NodeIndex) -> Tensor:
    """Select nodes, each of which receives a gradient from one slot only."""
    if isinstance(nodes, slice):
        return states[nodes]
    return states.index_select(0, nodes)


def take_shared(states: Tensor, nodes: NodeIndex) -> Tensor:
    """Select nodes that may be on many paths, and receive the sum of the gradients of all."""
    if isinstance(nodes, slice) or states.dtype.itemsize >= 4:
        return take(states, nodes)
    selected: Tensor = _SharedNodes.apply(states, nodes)
    return selected


class _SharedNodes(torch.autograd.Function):
    """`index_select` whose gradients are added up in float32."""

    # On a GPU torch rounds each sum to 16 bits: with 16 to 64 paths the gradient of a shared node is off by 0.5 to 1 %.

    @staticmethod
    def forward(ctx, states: Tensor, nodes: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(nodes)
        ctx.shape = states.shape
        return states.index_select(0, nodes)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (nodes,) = ctx.saved_tensors
        sums = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        sums.index_add_(0, nodes, gradient.float())
        return sums.to(gradient.dtype), None


def for_each_head(states: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[x, K, ...]` to `[x, heads, ...]`: consecutive query heads share one."""
    if states.size(1) == heads:
        return states
    return states.repeat_interleave(heads // states.size(1), 1)
