"""A control for selection over the batch: a rule of one's own, as recipes name it (benchmarks/batch_study.yaml).

`max_variance` over a batch decides two things: how many rows each prompt gets, and which of its rollouts fill them. The
batch's own rule `random` keeps the first decision and draws the second. `shuffled_sizes` does the opposite.
"""

from __future__ import annotations

import torch

from pods_rl.selection import BatchSelection, RolloutBatch
from pods_rl.selection.batch import best_sizes, keep_sizes
from pods_rl.selection.rules import max_variance


def shuffled_sizes(batch: RolloutBatch) -> BatchSelection:
    """Give the sizes of `max_variance` to prompts in random order, and keep the paper's rows within each prompt.

    A step has the same rows, the same number of prompts and the same uneven sizes. It lacks the knowledge of which
    prompts to give rows to, so prompts whose rewards are all equal get rows too, and these have no gradient. If the
    batch is above this control, its gain does not come from uneven sizes or from more prompts alone. That only prompts
    with equal rewards have to be avoided is the claim of another arm of the study, dynamic sampling.

    >>> rewards = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    >>> batch = RolloutBatch(rewards, rows=6, generator=torch.Generator().manual_seed(0))
    >>> sorted(shuffled_sizes(batch).sizes.tolist())
    [0, 2, 4]
    """
    sizes_P = best_sizes(batch.rewards, batch.rows)
    device = "cpu" if batch.generator is None else batch.generator.device
    order_P = torch.randperm(len(sizes_P), generator=batch.generator, device=device)
    return keep_sizes(batch, sizes_P[order_P.to(sizes_P.device)], max_variance)
