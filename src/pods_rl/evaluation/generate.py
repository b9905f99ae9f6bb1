"""Completions by `model.generate`: any model, any device, several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from .evaluator import Completion, RowsDone, Sampling

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
        """Return completion ids [rows, T] of a batch; prompts are padded on the left, completions on the right."""
        width = max(map(len, prompts_ids))
        device = self.model.device
        padded = torch.tensor([[self._pad] * (width - len(ids)) + list(ids) for ids in prompts_ids], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts_ids], device=device)
        draws = RowDraws(rows, width, how, device) if how.temperature else None
        # greedy for `generate`, since `draws` leaves one token; the model's own defaults and penalties are not used
        config = GenerationConfig(
            do_sample=False,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=how.max_completion_length,
            pad_token_id=self._pad,
            eos_token_id=sorted(self._ends) or None,
        )
        output = self.model.generate(
            input_ids=padded,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([draws] if draws else []),
            synced_gpus=False,  # the weights are gathered here, and processes may have different numbers of batches
        )
        return output[:, width:]

    def _cut(self, ids: list[int]) -> Completion:
        """Return the completion up to its first end token."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self._ends), None)
        kept = ids[:length]
        return Completion(self.tokenizer.decode(kept, skip_special_tokens=True), len(kept), length is not None)


class RowDraws(LogitsProcessor):
    """Samples each row with its own uniform draws, by inverting the cumulative distribution.

    A draw depends on (seed, row, token), so a row's completion does not depend on its batch or process.

    Args:
        rows: the numbers of the batch's rows.
        prompt_width: columns before the first completion token.
        how: temperature (above 0), length and seed.
        device: the device of the scores.
    """

    def __init__(self, rows: Sequence[int], prompt_width: int, how: Sampling, device: torch.device | str) -> None:
        T = how.max_completion_length
        draws = [np.random.default_rng((how.seed, row)).random(T, dtype=np.float32) for row in rows]
        self._draws = torch.from_numpy(np.stack(draws)).to(device)
        self._prompt_width = prompt_width
        self._temperature = how.temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, vocabulary] that allow one token: the first with a cumulative sum above the draw."""
        cumulative = torch.softmax(scores.float() / self._temperature, dim=-1).cumsum(dim=-1)
        total = cumulative[:, -1:]
        # below the total even after rounding, so that a token of probability 0 is never drawn
        below = torch.minimum(
            self._draws[:, input_ids.size(1) - self._prompt_width, None] * total,
            torch.nextafter(total, torch.zeros_like(total)),
        )
        token = torch.searchsorted(cumulative, below, right=True)
        token.clamp_(max=scores.size(1) - 1)  # NaN scores select an arbitrary token; they must not stop the run
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)
