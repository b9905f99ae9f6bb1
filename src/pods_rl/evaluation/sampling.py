"""How completions are sampled: the settings, a completion, and what every backend offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowsDone = Callable[[int, int], None]  # called with the number of finished rows and of all rows of this process


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: the whole distribution, without top-k, top-p or penalties.

    Args:
        temperature: 0 means greedy.
        max_completion_length: tokens after which a completion is truncated.
        batch_size: rows that `generate` completes at once.
        seed: the seed of all draws, which do not depend on batches or processes.
        chat_template_kwargs: further arguments of the chat template.
    """

    temperature: float = 1.0
    max_completion_length: int = 256
    batch_size: int = 256
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.max_completion_length < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError(
                f"got {self}: expected a temperature and a seed of at least 0, a max_completion_length and a "
                "batch_size of at least 1"
            )


@dataclass(frozen=True)
class Completion:
    """One sampled completion: its text without special tokens, its length, whether it has an end token, its tokens."""

    text: str
    tokens: int
    ended: bool
    ids: Sequence[int] = ()


class Sampler(Protocol):
    """A policy that completes prompts with the library that `backend` names, in `dtype`."""

    backend: str
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Return a completion of each prompt (token ids), in order; `rows` seed their draws."""
