"""Which rows share a micro-batch: nodes by `prefix_tree` itself, and what every grouping must keep."""

from __future__ import annotations

import numpy as np
import pytest

from pods_rl.prefix_tree.grouping import _Trees, group_rows
from pods_rl.prefix_tree.tree import in_order_of_tokens, prefix_tree


def shuffled_rows(seed, prompts=4, rows_each=8, longest=40):
    """Rows of several prompts in random order; some begin alike, a few are equal."""
    draw = np.random.default_rng(seed)
    width = int(draw.integers(2, 12))
    rows = np.full((prompts * rows_each, width + longest), -1)
    for prompt in range(prompts):
        prompt_length = int(draw.integers(1, width + 1))
        prompt_ids = draw.integers(0, 50, prompt_length)
        for number in range(rows_each):
            row = prompt * rows_each + number
            length = int(draw.integers(1, longest + 1))
            rows[row, width - prompt_length : width] = prompt_ids
            rows[row, width : width + length] = draw.integers(0, 2, length)
            if number % 4 == 3:
                rows[row] = rows[row - 1]
    return rows[draw.permutation(len(rows))], width


def count_nodes(rows, width, members):
    return len(prefix_tree(rows, width, list(members)).tokens)


@pytest.mark.parametrize("seed", range(10))
def test_the_nodes_of_any_rows_are_those_of_their_tree(seed):
    rows, width = shuffled_rows(seed)
    trees = _Trees(rows, in_order_of_tokens(rows))
    draw = np.random.default_rng(seed)
    for size in (1, 2, 5, len(rows)):
        members = draw.permutation(len(rows))[:size].tolist()
        assert trees.nodes(members) == count_nodes(rows, width, members)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_groups_are_a_permutation_with_fewer_nodes_and_no_larger_tree(seed, size):
    rows, width = shuffled_rows(seed)
    groups = group_rows(rows, size)
    assert [len(members) for members in groups] == [size] * (len(rows) // size)
    assert sorted(row for members in groups for row in members) == list(range(len(rows)))
    nodes = [count_nodes(rows, width, members) for members in groups]
    given = [count_nodes(rows, width, range(start, start + size)) for start in range(0, len(rows), size)]
    assert nodes == sorted(nodes)
    assert max(nodes) <= max(given)
    assert sum(nodes) <= sum(given)
    if size == 8:  # as many as a prompt has
        assert sum(nodes) <= 1.02 * count_nodes(rows, width, range(len(rows)))


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_not_computed_fill_the_first_micro_batches(seed):
    rows, width = shuffled_rows(seed)
    live = np.random.default_rng(seed).random(len(rows)) < 0.4
    groups = group_rows(rows, 4, live.tolist())
    assert sorted(row for members in groups for row in members) == list(range(len(rows)))
    live_rows = [[row for row in members if live[row]] for members in groups]
    without_pass = [not members for members in live_rows]
    assert sum(without_pass) == (len(rows) - live.sum()) // 4
    assert without_pass == sorted(without_pass, reverse=True)
    nodes = [count_nodes(rows, width, members) for members in live_rows if members]
    given = [count_nodes(rows, width, range(start, start + 4)) for start in range(0, len(rows), 4)]
    assert max(nodes) <= max(given)


def test_without_a_live_row_every_row_has_a_place():
    rows, _ = shuffled_rows(0)
    groups = group_rows(rows, 8, [False] * len(rows))
    assert sorted(row for members in groups for row in members) == list(range(len(rows)))


def test_long_rows_do_not_end_in_one_micro_batch():
    """In the order of their tokens the four long completions are neighbours."""
    rows = np.full((8, 101), -1)
    rows[:, 0] = 5
    for row in range(8):
        length = 100 if row < 4 else 10
        rows[row, 1 : 1 + length] = 10 + row
    given = rows[[0, 4, 1, 5, 2, 6, 3, 7]]
    groups = group_rows(given, 4)
    assert [sum(int((given[row] >= 0).sum() > 50) for row in members) for members in groups] == [2, 2]


def test_many_rows_are_grouped_without_comparing_pairs(monkeypatch):
    monkeypatch.setattr("pods_rl.prefix_tree.grouping.MOST_ROWS_TO_BALANCE", 8)
    rows, width = shuffled_rows(1)
    groups = group_rows(rows, 8)
    assert sorted(row for members in groups for row in members) == list(range(len(rows)))
    assert sum(count_nodes(rows, width, members) for members in groups) == count_nodes(rows, width, range(len(rows)))
