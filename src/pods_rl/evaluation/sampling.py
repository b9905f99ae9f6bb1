"""What every backend that samples completions has in common: what goes in, what comes out, how rows are seeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

RowsDone = Callable[[int, int], None]  # called with the rows done and all rows of this process


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Args:
        temperature: 0 means greedy; nothing else shapes the distribution (no top-k, top-p or penalties).
        max_completion_length: tokens after which a completion is cut.
        batch_size: rows that `generate` completes at once.
        seed: of all draws; each row has its own, so they depend on neither batches nor processes.
        chat_template_kwargs: what the chat template is told besides the messages.
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
    """One sampled answer: its text without special tokens, its length in tokens, and whether it ended by itself."""

    text: str
    tokens: int
    ended: bool


class Sampler(Protocol):
    """A policy that completes prompts; `backend` names how."""

    backend: str
    tokenizer: Any

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """One completion to each prompt (token ids), in order; `rows` number the rows, for their seeds."""
