"""Draws of tokens that depend on each row's key alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..sums import running_sums


def draw_tokens(scores: Tensor, draws: Tensor, of_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the first token of each row with a cumulative probability above its draw: see `RowDraws.tokens`.

    Also returns `[rows, 1]`, finite where the probabilities are; a token without finite probabilities is arbitrary.
    """
    cumulative = running_sums(torch.softmax(scores, dim=-1, dtype=torch.float32))  # [rows or nodes, V]
    if of_rows is not None:
        cumulative = cumulative.index_select(0, of_rows)  # [rows, V]
    # Below the total even after rounding, since draws are (see `RowDraws`): no token of probability 0 is drawn.
    below = draws.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, below, right=True).squeeze(1)
    return tokens.clamp_(max=scores.size(1) - 1), below


class RowDraws(LogitsProcessor):
    """Samples each row with its own uniform draws, by inverting the cumulative distribution.

    A token depends on the row's key, its position and its scores, so a row's completion does not depend on its batch
    or process, up to rounding. As a logits processor of `generate` it leaves one token a row.

    Args:
        keys: of the rows: integers of at least 0, such as seed, generation, prompt and number.
        length: the most tokens of a completion; with a greater one the first draws are the same.
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
        draws = [np.random.default_rng(tuple(key)).random(length, dtype=np.float32) for key in keys]
        # The greatest draw times a total is less than the total, in float32 too.
        below_one = np.minimum(np.stack(draws, axis=1), np.float32(1 - 2**-23))
        self._draws = torch.from_numpy(below_one).to(device)  # [length, rows]
        self.prompt_width = prompt_width
        self._strict = strict
        self._below: list[Tensor] = []  # if strict: finite where the probabilities are; read once, at the end

    def tokens(self, scores: Tensor, at: int, rows: Tensor | None = None, of_rows: Tensor | None = None) -> Tensor:
        """Return a token for each row: the first with a cumulative probability above its draw.

        Args:
            scores: `[rows, V]`, or `[nodes, V]` with `of_rows`.
            at: the position in the completion, from 0.
            rows: which of the keys' rows these are. If None, all, in order.
            of_rows: the scores' row of each of these rows. If None, the scores are theirs, in order.
        """
        draws = self._draws[at]
        if rows is not None:
            draws = draws.index_select(0, rows)
        tokens, below = draw_tokens(scores, draws, of_rows)
        self.note(below)
        return tokens

    def table(self, rows: Tensor) -> Tensor:
        """Return the draws of some rows, `[length, rows]`."""
        return self._draws.index_select(1, rows)

    def note(self, below: Tensor) -> None:
        """Keep what is finite where probabilities are, for `check`."""
        if self._strict:
            self._below.append(below)

    def check(self) -> None:
        """If strict, raise the RuntimeError of `torch.multinomial` once a row's probabilities were not finite."""
        if self._below and not torch.isfinite(torch.cat(self._below)).all():
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, V] that allow one token."""
        token = self.tokens(scores, input_ids.size(1) - self.prompt_width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.unsqueeze(1), 0.0)
