"""Running sums that are deterministic on a GPU too."""

from __future__ import annotations

import torch
from torch import Tensor


def running_sums(values: Tensor) -> Tensor:
    """Return the sums of each row's values up to each column, `[rows, columns]`; the values are no longer usable.

    On a GPU torch has no deterministic `cumsum` of floating-point numbers, and raises an error if deterministic
    algorithms are required (`full_determinism`).

    >>> running_sums(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 3., 6.]])
    """
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum_(dim=-1)
    return sums_by_doubling(values)


def sums_by_doubling(values: Tensor) -> Tensor:
    """Return the sums of each row's values up to each column, by log2(columns) additions of tensors.

    >>> sums_by_doubling(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    tensor([[ 1.,  3.,  6., 10., 15.]])
    """
    columns = values.size(1)
    step = 1  # the number of terms that each sum has so far, or all that there are
    while step < columns:
        longer = values.clone()
        longer[:, step:].add_(values[:, :-step])
        values = longer
        step *= 2
    return values
