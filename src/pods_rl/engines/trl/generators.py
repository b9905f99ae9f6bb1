"""Fast generators under PODSTrainer: room for n in colocated vLLM, and what they return looked at before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl.trainer import grpo_trainer

from ...planning.batching import Shares
from .config import PODSConfig


@contextmanager
def room_for_rollouts(args: PODSConfig) -> Iterator[None]:
    """While TRL's trainer is built inside: colocated vLLM gets room for the rollouts of a generation, not for its rows.

    TRL takes `max_num_seqs`, the sequences that vLLM works on at once, from the rows that are trained; with m of n kept
    it would generate m at a time. `rollout_batch_size` bounds it, as it bounds the other generators.
    """
    build = grpo_trainer.VLLMGeneration
    assert args.num_rollouts is not None
    assert args.generation_batch_size is not None
    m = args.num_generations
    rollouts = max(Shares(args.generation_batch_size // m, args.num_rollouts, m, args.world_size).counts)
    at_once = min(rollouts, args.rollout_batch_size or rollouts) * args.vllm_tensor_parallel_size

    def with_room(**settings: Any) -> Any:
        return build(**settings | {"max_num_seqs": at_once})

    grpo_trainer.VLLMGeneration = with_room
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = build


def check_completions(prompts: int, completion_ids: Sequence[Sequence[int]]) -> None:
    """Refuse what would put completions beside the wrong prompts: one for each, with a token at least.

    Continuous batching logs a request that failed and leaves it out; those after it would then be scored against the
    answers of others.

    Raises:
        RuntimeError: how many are missing or empty.
    """
    empty = sum(len(ids) == 0 for ids in completion_ids)
    if len(completion_ids) != prompts or empty:
        raise RuntimeError(
            f"the generator returned {len(completion_ids)} completions for {prompts} prompts, {empty} of them without "
            "a token, so which prompt each belongs to is not known. Its own log above says why; where it ran out of "
            "memory, set a smaller rollout_batch_size."
        )


def lossy_cast(trainer: Any) -> str | None:
    """Return a sentence where continuous batching makes TRL round the policy's weights to generate, else None."""
    args = trainer.args
    if not (trainer.use_transformers_continuous_batching and (args.bf16 or args.fp16)):
        return None
    if torch.float32 not in {p.dtype for p in trainer.model.parameters() if p.requires_grad}:
        return None
    flag, to = ("bf16", "bfloat16") if args.bf16 else ("fp16", "float16")
    return (
        f"use_transformers_continuous_batching with {flag} = true: before each generation TRL turns the trained "
        f"float32 weights into {to}, for good, and small updates are then rounded away. Set {flag}: false, or load "
        f"the policy as {to} knowingly (dtype: {to})."
    )
