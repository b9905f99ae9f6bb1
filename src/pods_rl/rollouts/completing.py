"""Completions of prompts given as token ids, for evaluation and for rollout servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .generating import complete
from .sampling import RowDraws

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def complete_prompts(
    model: PreTrainedModel,
    prompts_ids: Sequence[Sequence[int]],
    draws: RowDraws | None,
    *,
    length: int,
    ends: Sequence[int],
    pad: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """Return completions `[rows, T]` of a batch of prompts, each with its own draws, padded on the right.

    The model's own sampling defaults and penalties are not used.

    Args:
        prompts_ids: tokens of each row's prompt; equal prompts are computed once.
        draws: of the rows; None: greedy.
        length: most tokens of a completion.
        ends: tokens that end a completion.
        pad: the token after a row's end.
        temperature, top_k, top_p: of the draws; a top_k below 1 keeps all tokens.
    """
    width, device = max(map(len, prompts_ids)), model.device
    padded = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts_ids], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts_ids], device=device)
    # greedy for `generate`, since draws leave one token
    config = GenerationConfig(
        do_sample=False,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=length,
        pad_token_id=pad,
        eos_token_id=sorted(ends) or None,
    )
    inputs: dict[str, Any] = {
        "input_ids": padded,
        "attention_mask": mask,
        "generation_config": config,
        "synced_gpus": False,  # whole weights are here, and processes may have different numbers of batches
    }
    if draws is None:
        return complete(model.generate, inputs)[:, width:]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    inputs["logits_processor"] = warpers
    drawn = {"logits_processor": LogitsProcessorList([*warpers, draws])}
    return complete(model.generate, inputs, draws, otherwise=drawn)[:, width:]
