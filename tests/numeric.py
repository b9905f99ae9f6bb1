"""Comparison of computed numbers that holds on every processor: relative to the size of what is compared."""

from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT32 = 1e-5  # about a hundred roundings of float32
FLOAT64 = 1e-12


def assert_near(got: Tensor | Mapping[str, Tensor], expected: Tensor | Mapping[str, Tensor], tolerance: float) -> None:
    """Raise AssertionError unless the difference is at most `tolerance` of the norm of what was expected.

    Of several tensors, such as the gradients of a model, one with less than a hundredth of the norm of all is
    compared with that: it may be zero but for rounding.

    >>> assert_near(torch.tensor([3.0, 4.00001]), torch.tensor([3.0, 4.0]), 1e-5)
    >>> assert_near({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.1])}, 1e-5)
    Traceback (most recent call last):
    AssertionError: a: apart by 9.1e-02 of its size, more than 1e-05
    """
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        got, expected = {"values": got}, {"values": expected}
    assert got.keys() == expected.keys()
    sizes = {name: torch.linalg.vector_norm(value.double()).item() for name, value in expected.items()}
    everything = sum(size**2 for size in sizes.values()) ** 0.5
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        apart = torch.linalg.vector_norm(got[name].double() - value.double()).item()
        apart /= max(sizes[name], everything / 100, 1e-300)
        assert apart <= tolerance, f"{name}: apart by {apart:.1e} of its size, more than {tolerance:.0e}"
