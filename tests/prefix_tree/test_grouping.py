"""Which rows share a pass: nodes by `prefix_tree` itself, cuts by trying all, and what every division must keep."""

from itertools import combinations

import numpy as np
import pytest

from pods_rl.prefix_tree.grouping import divide_rows
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


def nodes_of(rows, width, members):
    return len(prefix_tree(rows, width, list(members)).tokens) if members else 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("budget", [30, 80, 200, 10_000])
def test_passes_have_every_row_once_and_trees_within_the_budget(seed, budget):
    rows, width = shuffled_rows(seed)
    passes = divide_rows(rows, budget)
    assert sorted(row for members in passes for row in members) == list(range(len(rows)))
    nodes = [nodes_of(rows, width, members) for members in passes]
    assert nodes == sorted(nodes)
    for members, count in zip(passes, nodes, strict=True):
        assert count <= budget or len(members) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_cut_of_neighbours_has_fewer_passes_or_a_smaller_largest_tree(seed):
    rows, width = shuffled_rows(seed, prompts=2, rows_each=4, longest=12)
    in_order = in_order_of_tokens(rows)
    largest = {}  # by the number of passes, the smallest largest tree of all cuts
    for count in range(1, len(rows) + 1):
        trees = []
        for borders in combinations(range(1, len(rows)), count - 1):
            ends = [*borders, len(rows)]
            starts = [0, *borders]
            trees.append(max(nodes_of(rows, width, in_order[a:b]) for a, b in zip(starts, ends, strict=True)))
        largest[count] = min(trees)
    for budget in range(min(largest.values()), max(largest.values()) + 1):
        passes = divide_rows(rows, budget)
        fewest = min(count for count, nodes in largest.items() if nodes <= budget)
        assert len(passes) <= fewest
        assert max(nodes_of(rows, width, members) for members in passes) == largest[fewest]


def test_a_budget_below_the_longest_row_takes_that_row_alone():
    rows = np.array([[5, 6, 7, 8, 9], [5, 1, -1, -1, -1], [5, 2, -1, -1, -1]])
    assert divide_rows(rows, 1) == [[1], [2], [0]]
    assert divide_rows(rows, 2) == [[1, 2], [0]]


def test_the_passes_are_no_more_than_allowed():
    rows, width = shuffled_rows(0)
    passes = divide_rows(rows, 1, most_passes=3)
    assert len(passes) == 3
    within = max(nodes_of(rows, width, members) for members in passes)
    assert len(divide_rows(rows, within)) == 3


@pytest.mark.parametrize("least", [1, 2, 5, 32])
def test_the_passes_are_no_fewer_than_another_process_needs(least):
    """Equal rows are divided too."""
    rows, _ = shuffled_rows(1)
    for live in (len(rows), 2, 0):
        rows[live:] = -1
        passes = divide_rows(rows, 10_000, least_passes=least)
        assert len(passes) == least
        assert all(passes)
        assert sorted(row for members in passes for row in members) == list(range(len(rows)))
