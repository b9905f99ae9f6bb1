"""Completions of a policy: the settings, what a backend offers, and the backend by `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..rollouts.generating import complete_prompts
from ..rollouts.sampling import RowDraws

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RowsDone = Callable[[int, int], None]  # called with the number of finished rows and of all rows of this process


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Draws are from all tokens, without top-k, top-p or penalties.

    Args:
        temperature: 0 means greedy.
        max_completion_length: tokens after which a completion is truncated.
        batch_size: rows that `generate` completes at once.
        seed: the seed of all draws, which do not depend on batches or processes.
        chat_template_kwargs: more arguments of the chat template.
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


class GenerateSampler:
    """Completes prompts with `model.generate`.

    It restores the random state and the mode of the model, so an evaluation never changes a run. Each row has its own
    draws, so its completion is the same in every batch, up to rounding.

    Args:
        model: a causal language model, on any device.
        tokenizer: of that model.
    """

    backend = "generate"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.dtype, self.tokenizer = model, model.dtype, tokenizer
        ends = model.generation_config.eos_token_id
        self._ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        pad = tokenizer.pad_token_id
        self._pad = pad if pad is not None else min(self._ends, default=0)

    @torch.no_grad()
    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Complete each prompt, in order (see `Sampler`)."""
        # Longest first: an out-of-memory error shows at once, and the estimated time left does not grow.
        order = sorted(range(len(rows)), key=lambda i: -len(prompts_ids[i]))
        completions: dict[int, Completion] = {}
        was_training = self.model.training
        try:
            self.model.eval()
            for start in range(0, len(order), how.batch_size):
                batch = order[start : start + how.batch_size]
                ids = self._generate([prompts_ids[i] for i in batch], [rows[i] for i in batch], how)
                completions |= zip(batch, map(self._cut, ids), strict=True)
                done(start + len(batch), len(order))
        finally:
            self.model.train(was_training)
        return [completions[i] for i in range(len(rows))]

    def _generate(self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling) -> list[list[int]]:
        """Return the completion ids of a batch, padded on the right."""
        draws, length = None, how.max_completion_length
        if how.temperature:
            keys, width = [(how.seed, row) for row in rows], max(map(len, prompts_ids))
            draws = RowDraws(keys, length, self.model.device, prompt_width=width)
        ends, temperature = sorted(self._ends), how.temperature
        found = complete_prompts(
            self.model, prompts_ids, draws, length=length, ends=ends, pad=self._pad, temperature=temperature
        )
        return list(found.tolist())

    def _cut(self, ids: list[int]) -> Completion:
        """Return the completion up to its first end token."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self._ends), None)
        kept = ids[:length]
        return Completion(self.tokenizer.decode(kept, skip_special_tokens=True), len(kept), length is not None, kept)
