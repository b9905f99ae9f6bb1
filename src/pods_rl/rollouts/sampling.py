"""Tokens drawn row by row: each row has uniform draws of its own, which depend on its key alone.

So a rollout does not depend on its batch or process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor


def uniforms(key: Sequence[int], count: int) -> np.ndarray:
    """Return `count` draws in [0, 1), float32, that depend on `key` alone; a longer call begins with the same draws.

    Args:
        key: integers of at least 0: seed, generation, prompt, number.

    >>> bool((uniforms((0, 1), 8)[:3] == uniforms((0, 1), 3)).all())
    True
    """
    return np.random.default_rng(tuple(key)).random(count, dtype=np.float32)


class RowDraws(LogitsProcessor):
    """Samples each row with its own uniform draws, by inverting the cumulative distribution.

    A token depends on the row's key, its position and its scores, so a row's completion does not depend on its batch
    or process, up to rounding. As a logits processor of `generate` it leaves one token a row.

    Args:
        keys: of the rows; see `uniforms`.
        length: the most tokens of a completion.
        device: the device of the scores.
        prompt_width: columns before the first completion token, read by the logits processor.
        strict: let `check` raise if probabilities were not finite; else such a token is arbitrary.

    >>> draws = RowDraws([(0, 1), (0, 1), (0, 2)], length=4)
    >>> tokens = draws.tokens(torch.zeros(3, 1000), at=0)
    >>> bool(tokens[0] == tokens[1] != tokens[2])
    True
    """

    def __init__(
        self,
        keys: Sequence[Sequence[int]],
        length: int,
        device: torch.device | str = "cpu",
        *,
        prompt_width: int = 0,
        strict: bool = False,
    ) -> None:
        self._draws = torch.from_numpy(np.stack([uniforms(key, length) for key in keys])).to(device)
        self._prompt_width, self._strict = prompt_width, strict
        self._sum = torch.zeros((), device=device)  # of all totals: finite while each was

    def __len__(self) -> int:
        return len(self._draws)

    def tokens(self, scores: Tensor, at: int, rows: Tensor | None = None) -> Tensor:
        """Return a token for each row of scores `[rows, V]`: the first with a cumulative sum above its draw.

        Args:
            at: the position in the completion, from 0.
            rows: which of the keys' rows these are; None: all, in order.
        """
        draws = self._draws[:, at, None] if rows is None else self._draws[rows, at, None]
        cumulative = torch.softmax(scores, dim=-1, dtype=torch.float32).cumsum_(dim=-1)
        total = cumulative[:, -1:]
        if self._strict:
            self._sum += total.sum()
        # below the total even after rounding, so that a token of probability 0 is never drawn
        below = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, below, right=True).squeeze(1).clamp_(max=scores.size(1) - 1)

    def check(self) -> None:
        """If strict, raise the RuntimeError of `torch.multinomial` once a row's probabilities were not finite."""
        if self._strict and not torch.isfinite(self._sum):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, V] that allow one token."""
        token = self.tokens(scores, input_ids.size(1) - self._prompt_width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.unsqueeze(1), 0.0)
