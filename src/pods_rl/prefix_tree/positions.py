"""How many positions a language model has: a table of positions ends, rotary positions continue untrained."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from .cache import rope_types

# What transformers calls the table of positions of a text model: GPT-2, GPT-Neo, OPT, BERT, GPT, GPT-J and CTRL.
_TABLE = re.compile(r"wpe|embed_positions|position_embeddings?|positions_embed|pos_encoding")
_LONGEST = 100  # prompts that are compared by tokens, of those with the longest text


@dataclass(frozen=True)
class Positions:
    """The positions of a model."""

    count: int  # that it has a table for, or was configured for
    end: bool  # whether there is a table, so that no row can be longer

    def check(self, prompt: int, completion: int, *, which: str, advice: str, trains: bool = True) -> str | None:
        """Return a note if rows are longer than rotary positions were configured for; None if they fit.

        Args:
            prompt, completion: the most tokens of each.
            which: names the prompt, as in `The longest training prompt`.
            advice: how to shorten the prompts.
            trains: whether the last token of a completion is read too, as in an update and not in generation.

        Raises:
            UserError: the rows are longer than the table.
        """
        needed = prompt + completion - (not trains)
        if needed <= self.count:
            return None
        tokens = "1 token" if prompt == 1 else f"{prompt:,} tokens"
        sizes = f"{which} has {tokens}, which with max_completion_length = {completion:,} needs {needed:,} positions"
        if not self.end:
            return (
                f"{sizes}. The policy is configured for {self.count:,} (max_position_embeddings): beyond them its text "
                "may be worse."
            )
        room = self.count - prompt + (not trains)
        change = f"Set max_completion_length to at most {room:,}, or {advice}." if room > 0 else f"First {advice}."
        raise UserError(
            f"{sizes}. The policy has a table of {self.count:,} (learned or fixed), and none beyond its end. {change}"
        )


def positions_of(model: PreTrainedModel) -> Positions | None:
    """Return the positions of a model, which may be sharded or on "meta"; None if it has none, as with ALiBi."""
    config = model.config.get_text_config(decoder=True)
    configured = getattr(config, "max_position_embeddings", None)
    rows = [_rows_of(name, module, configured or 1) for name, module in model.named_modules()]
    tables = [count for count in rows if count is not None]
    if tables:  # the shortest decides
        return Positions(min(tables), end=True)
    if isinstance(configured, int) and rope_types(config) == {"default"}:  # other kinds are made for longer rows
        return Positions(configured, end=False)
    return None


def _rows_of(name: str, module: nn.Module, least: int) -> int | None:
    """Return the positions of a module that is or holds a table of positions, else None."""
    # A table with fewer than `least` rows belongs to images.
    rows: int | None = None
    if _TABLE.fullmatch(name.rpartition(".")[2]) and isinstance(module, nn.Embedding):
        rows = module.num_embeddings - getattr(module, "offset", 0)
        if type(module) is nn.Embedding and module.padding_idx is not None:  # as RoBERTa: positions begin after it
            rows -= module.padding_idx + 1
            least -= module.padding_idx + 1
    # Tables that are computed and not learned.
    for buffer_name, buffer in module.named_buffers(recurse=False):
        if _TABLE.fullmatch(buffer_name) and buffer.ndim == 2:
            rows = len(buffer)
    if rows is None or rows < least:
        return None
    return rows


def with_longest_text(prompts: Iterable[Any]) -> list[Any]:
    """Return the prompts with the longest text, among which the one with the most tokens is, with few exceptions."""
    return heapq.nlargest(_LONGEST, prompts, key=lambda prompt: len(str(prompt)))
