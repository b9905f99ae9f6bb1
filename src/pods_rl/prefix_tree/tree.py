"""The prefix tree of some rows of tokens, laid out as one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Branch:
    """The part of a row that no row before it has, with the way to it from the root."""

    path: NDArray[np.int64]  # the nodes of the row, from the root to its end
    new: int  # how many of them, the last ones, are new; they stand side by side in the sequence
    same_prompt: bool  # whether the branch before is of the same prompt


@dataclass(frozen=True)
class PrefixTree:
    """The distinct prefixes of some rows in depth-first order, so that each row's new nodes stand side by side.

    A node is a token together with the token after it. So each node has one label, and rows part one token before
    they differ. A row's last token predicts nothing and has no node.
    """

    tokens: NDArray[np.int64]  # [L], of the nodes
    labels: NDArray[np.int64]  # [L], the tokens after them
    columns: NDArray[np.int64]  # [L], where the nodes stand in their rows
    nodes: NDArray[np.int64]  # [B, T - 1], the node of each column of each row; -1 where there is none
    branches: list[Branch]  # the rows that have a node of their own, in the order of the sequence


def prefix_tree(rows: NDArray[np.int64], prompt_width: int, chosen: list[int] | None = None) -> PrefixTree:
    """Return the tree of some rows, in a time that is linear in their tokens.

    Rows share a node only in the same column, so prompts of different lengths, which begin in different columns, share
    nothing: a node's position is that of all its rows.

    Args:
        rows: `[B, T]`, prompts on the left, completions on the right, -1 around them; each has two tokens at least.
        prompt_width: columns of the prompts.
        chosen: the rows that count. If None, all.

    >>> tree = prefix_tree(np.array([[5, 6, 7, 8], [5, 6, 7, 9], [-1, 6, 7, 8]]), prompt_width=2)
    >>> tree.tokens.tolist(), tree.labels.tolist(), tree.columns.tolist()
    ([6, 7, 5, 6, 7, 7], [7, 8, 6, 7, 8, 9], [1, 2, 0, 1, 2, 2])
    >>> tree.nodes.tolist()
    [[2, 3, 4], [2, 3, 5], [-1, 0, 1]]
    """
    width = rows.shape[1]
    is_token = rows >= 0
    first_columns = is_token.argmax(1)  # [B]
    last_columns = width - 1 - is_token[:, ::-1].argmax(1)  # [B]
    nodes = np.full((len(rows), width - 1), -1)
    branches: list[Branch] = []
    owners: list[NDArray[np.int64]] = []  # the row of each node, by branch
    columns: list[NDArray[np.int64]] = []  # and its column
    count = 0
    before = None
    # Rows that begin alike are neighbours in the order of their tokens, so each row is compared with one other.
    for row in in_order_of_tokens(rows, chosen):
        start = int(first_columns[row])
        end = int(last_columns[row])
        first_new = start
        same_prompt = False
        if before is not None:
            differ = rows[row] != rows[before]
            parting = int(differ.argmax()) if differ.any() else end + 1
            same_prompt = parting >= prompt_width
            # The node before the first different token has that token as its label, so it is not shared either.
            first_new = max(start, parting - 1)
            nodes[row, start:first_new] = nodes[before, start:first_new]
        new = end - first_new
        if new > 0:
            nodes[row, first_new:end] = np.arange(count, count + new)
            branches.append(Branch(nodes[row, start:end], new, same_prompt))
            owners.append(np.full(new, row))
            columns.append(np.arange(first_new, end))
            count += new
        before = row
    row_of_node = np.concatenate(owners)  # [L]
    column_of_node = np.concatenate(columns)  # [L]
    tokens = rows[row_of_node, column_of_node]
    labels = rows[row_of_node, column_of_node + 1]
    return PrefixTree(tokens, labels, column_of_node, nodes, branches)


def in_order_of_tokens(rows: NDArray[np.int64], chosen: list[int] | None = None) -> list[int]:
    """Return the numbers of the rows, or of the chosen ones, in the order of their tokens; -1 comes first."""
    # Big-endian, so that the order of bytes is that of tokens.
    sortable = (rows + 1).astype(">u4")
    numbers = range(len(rows)) if chosen is None else chosen
    return sorted(numbers, key=lambda row: sortable[row].tobytes())


def by_prompt(branches: list[Branch]) -> list[list[Branch]]:
    """Return the branches of each prompt, which follow each other."""
    prompts: list[list[Branch]] = []
    for branch in branches:
        if branch.same_prompt:
            prompts[-1].append(branch)
        else:
            prompts.append([branch])
    return prompts


def common_nodes(of_prompt: list[Branch]) -> int:
    """Return how many nodes all rows of a prompt share; of a single row, all."""
    forks = [len(branch.path) - branch.new for branch in of_prompt[1:]]
    return min([len(of_prompt[0].path), *forks])
