"""Batches the tiny policy is trained on: drills of bare steps, and whole completions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import repeat

import torch
from transformers import Qwen2Tokenizer

from ..tasks.arithmetic import DIFFICULTIES, Difficulty, Problem, draw_problem
from .mixture import Mixture

IGNORED = -100  # what cross-entropy leaves out
Example = tuple[list[int], list[int]]  # token ids, and for each the id to predict or IGNORED
Batch = dict[str, torch.Tensor]
_DRILL = Difficulty(min_terms=7, max_terms=7)


def completion_batches(tokenizer: Qwen2Tokenizer, mixture: Mixture, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches of prompts with completions drawn from the mixture, for ever; the loss counts completions only.

    No held-out prompt is ever drawn. Sums of one length go together, so that little padding is computed.
    """
    rng = random.Random(seed)
    while True:
        pool = [_completion(tokenizer, mixture, rng) for _ in range(8 * size)]
        pool.sort(key=lambda example: len(example[0]))
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        yield from (_collate(pool[start : start + size], tokenizer.pad_token_id) for start in starts)


def drill_batches(tokenizer: Qwen2Tokenizer, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches of chains of thought without a prompt, for ever; the loss counts running totals only.

    Adding is the hard part: among all the easy tokens of a completion it is learned many times more slowly.
    """
    rng = random.Random(seed)
    while True:
        yield _collate([_drill(tokenizer, rng) for _ in range(size)], tokenizer.pad_token_id)


def _completion(tokenizer: Qwen2Tokenizer, mixture: Mixture, rng: random.Random) -> Example:
    problem = _train_problem(rng)
    prompt = tokenizer.encode(problem.prompt)
    completion = [*tokenizer.encode(mixture.draw_completion(rng, problem)), tokenizer.eos_token_id]
    return prompt + completion, [IGNORED] * len(prompt) + completion


def _train_problem(rng: random.Random) -> Problem:
    return next(p for p in (draw_problem(rng, DIFFICULTIES["mixed"]) for _ in repeat(None)) if not p.held_out)


def _drill(tokenizer: Qwen2Tokenizer, rng: random.Random) -> Example:
    problem = draw_problem(rng, _DRILL)
    ids = tokenizer.encode(f"<think>{problem.terms[0]}")
    labels = [IGNORED] * len(ids)
    for term, total in zip(problem.terms[1:], problem.totals, strict=True):
        step, result = tokenizer.encode(f"\n{term:+d}="), tokenizer.encode(str(total))
        ids += step + result
        labels += [IGNORED] * len(step) + result
    return ids, labels


def _collate(examples: list[Example], pad: int) -> Batch:
    """Pad to the right: causality keeps the padding out of sight, so no attention mask is needed."""
    width = max(len(ids) for ids, _ in examples)
    padded = [(ids + [pad] * (width - len(ids)), y + [IGNORED] * (width - len(y))) for ids, y in examples]
    return {
        "input_ids": torch.tensor([ids for ids, _ in padded]),
        "labels": torch.tensor([y for _, y in padded]),
    }
