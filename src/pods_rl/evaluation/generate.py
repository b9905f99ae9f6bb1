"""Completions by `model.generate`, each prompt computed once: any model, any device, several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..rollouts.generating import complete_prompts
from ..rollouts.sampling import RowDraws
from .sampling import Completion, RowsDone, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class GenerateSampler:
    """Completes prompts with `model.generate`.

    It restores the random state and the mode of the model, so an evaluation never changes a run. Rows of
    similar length share a batch; since each row has its own draws, its completion is the same in every batch, up
    to rounding.

    Args:
        model: a causal language model, on any device.
        tokenizer: of that model.
    """

    backend = "generate"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.dtype = model.dtype
        self.tokenizer = tokenizer
        ends = model.generation_config.eos_token_id
        self._ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        pad = tokenizer.pad_token_id
        self._pad = pad if pad is not None else min(self._ends, default=0)

    @torch.no_grad()
    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Complete each prompt, in order (see `Sampler`)."""
        # longest first: an out-of-memory error shows at once, and the estimated time left does not grow
        order = sorted(range(len(rows)), key=lambda i: -len(prompts_ids[i]))
        completions: list[Completion | None] = [None] * len(rows)
        was_training = self.model.training
        try:
            self.model.eval()
            for start in range(0, len(order), how.batch_size):
                batch = order[start : start + how.batch_size]
                ids = self._generate([prompts_ids[i] for i in batch], [rows[i] for i in batch], how)
                for i, completion in zip(batch, map(self._cut, ids.tolist()), strict=True):
                    completions[i] = completion
                done(start + len(batch), len(order))
        finally:
            self.model.train(was_training)
        return [completion for completion in completions if completion is not None]

    def _generate(self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling) -> Tensor:
        """Return completion ids [rows, T] of a batch, padded on the right."""
        draws = None
        if how.temperature:
            keys = [(how.seed, row) for row in rows]
            draws = RowDraws(
                keys, how.max_completion_length, self.model.device, prompt_width=max(map(len, prompts_ids))
            )
        return complete_prompts(
            self.model,
            prompts_ids,
            draws,
            length=how.max_completion_length,
            ends=sorted(self._ends),
            pad=self._pad,
            temperature=how.temperature,
        )

    def _cut(self, ids: list[int]) -> Completion:
        """Return the completion up to its first end token."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self._ends), None)
        kept = ids[:length]
        return Completion(self.tokenizer.decode(kept, skip_special_tokens=True), len(kept), length is not None, kept)
