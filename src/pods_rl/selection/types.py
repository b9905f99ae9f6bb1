"""A rule, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .validation import describe

# Engines treat larger rewards as unscored: their float32 variance would overflow in a group of 1024.
REWARD_LIMIT = 1e15


class Rule(Protocol):
    """Which m of n rollouts to keep: rewards `[P, N]` to int64 indices `[P, M]`, distinct within a row."""

    def __call__(self, rewards_PN: Tensor, m: int, /, *, generator: torch.Generator | None = None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Selection:
    """The rollouts kept of each prompt.

    Args:
        indices: int64 `[P, M]`, rollouts of the prompt's own group, 0 to n - 1, distinct within a row.
        weights: floating `[P, M]`, a factor on each kept row's advantage; None means 1 everywhere.

    Raises:
        TypeError, ValueError: another dtype, shape or device than these.

    >>> Selection(torch.tensor([[0, 2]])).mask(4)
    tensor([[ True, False,  True, False]])
    """

    indices: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.indices, Tensor) or self.indices.dtype != torch.int64:
            raise TypeError(f"Selection.indices must be an int64 tensor [P, M]; got {describe(self.indices)}.")
        if self.indices.ndim != 2 or self.indices.shape[1] == 0:
            raise ValueError(f"Selection.indices must have shape [P, M], M >= 1; got {describe(self.indices)}.")
        if self.weights is None:
            return
        if not isinstance(self.weights, Tensor) or not self.weights.is_floating_point():
            raise TypeError(f"Selection.weights must be a floating tensor [P, M]; got {describe(self.weights)}.")
        if self.weights.shape != self.indices.shape or self.weights.device != self.indices.device:
            raise ValueError(
                f"Selection.weights must match indices, {describe(self.indices)} on {self.indices.device}; "
                f"got {describe(self.weights)} on {self.weights.device}."
            )

    def mask(self, n: int) -> Tensor:
        """True where a rollout is kept: bool `[P, N]`.

        Args:
            n: rollouts generated per prompt; an index of n or more is a ValueError.
        """
        mask_PN = torch.zeros(self.indices.shape[0], n, dtype=torch.bool, device=self.indices.device)
        self._check_range(n)
        return mask_PN.scatter_(1, self.indices, True)

    def take(self, values_PN: Tensor) -> Tensor:
        """The kept rollouts' values, `[P, M]`, of any values `[P, N]`.

        Raises:
            ValueError: values of another number of prompts, or an index that they do not have.

        >>> Selection(torch.tensor([[2, 0]])).take(torch.tensor([[5.0, 6.0, 7.0]]))
        tensor([[7., 5.]])
        """
        if values_PN.ndim != 2 or values_PN.shape[0] != self.indices.shape[0]:
            raise ValueError(
                f"a selection of {self.indices.shape[0]} prompts needs values [P, N] of as many; "
                f"got {describe(values_PN)}."
            )
        self._check_range(values_PN.shape[1])
        return values_PN.gather(1, self.indices)

    def _check_range(self, n: int) -> None:
        if ((self.indices < 0) | (self.indices >= n)).any():
            low, high = int(self.indices.min()), int(self.indices.max())
            raise ValueError(f"indices must lie between 0 and n - 1 = {n - 1}; got {low} to {high}.")
