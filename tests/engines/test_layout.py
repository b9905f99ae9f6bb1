"""Packing rows, trimmed and sorted: worked values."""

from __future__ import annotations

import pytest
import torch

from pods_rl.engines.trl.packing import real_columns, sort_windows, steps_window


@pytest.mark.parametrize(
    ("mask", "prompt_width", "multiple_of", "expected"),
    [
        ([[0, 1, 1, 1, 0]], 2, None, (1, 4)),
        ([[1, 1, 1, 1, 1]], 2, None, (0, 5)),
        ([[0, 0, 0, 0, 0]], 2, None, (1, 5)),  # nothing real: one prompt column and the whole completion
        ([[0, 1, 0, 0, 0]], 2, None, (1, 3)),  # a masked-out completion keeps one column
        ([[0, 0, 1, 1, 1, 0, 0, 0, 0]], 4, 4, (0, 8)),
        ([[0, 0, 1, 1, 1, 0, 0]], 4, 4, (0, 7)),  # never wider than what there is
    ],
)
def test_real_columns(mask, prompt_width, multiple_of, expected):
    columns = real_columns(torch.tensor(mask), prompt_width, multiple_of)
    assert (columns.start, columns.stop) == expected


def micro_batch(lengths, tag):
    T = 6
    mask = torch.tensor([[1] * n + [0] * (T - n) for n in lengths])
    return {
        "completion_ids": mask * 7,
        "completion_mask": mask,
        "advantages": torch.tensor([float(tag * 10 + i) for i in range(len(lengths))]),
        "num_items_in_batch": torch.tensor(9),
    }


def test_rows_stay_in_their_optimizer_step():
    batches = [micro_batch([6, 1], 0), micro_batch([2, 5], 1), micro_batch([3, 3], 2), micro_batch([4, 1], 3)]
    arranged = sort_windows(batches, window=2)
    assert [b["completion_mask"].sum(1).tolist() for b in arranged] == [[1, 2], [5, 6], [1, 3], [3, 4]]
    assert [b["advantages"].tolist() for b in arranged] == [[1.0, 10.0], [11.0, 0.0], [31.0, 20.0], [21.0, 30.0]]
    assert all(b["num_items_in_batch"] == 9 for b in arranged)


def test_windows():
    assert steps_window(4, 4) == 4
    assert steps_window(8, 2) == 2
    assert steps_window(1, 4) == 1
    assert steps_window(3, 2) is None
