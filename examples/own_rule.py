"""A rule of your own: which m of a prompt's n rollouts to train on.

    PYTHONPATH=examples pods train tiny-pods --max_seconds 20 --rule own_rule:extremes_and_random

Needs: pods-rl; half a minute on one CPU core. `select` and `PODSConfig(rule=...)` take the function itself
(docs/how-it-works.md).
"""

import torch


def extremes_and_random(rewards: torch.Tensor, m: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the highest and the lowest reward of each group, and m - 2 others at random: [P, N] to indices [P, M].

    NaN marks an unscored rollout, and comes last.

    >>> rewards = torch.tensor([[0.0, 0.2, 1.0, 0.1, float("nan")]])
    >>> extremes_and_random(rewards, 2).sort().values
    tensor([[0, 2]])
    """
    order = torch.rand(rewards.shape, generator=generator).to(rewards.device)
    unscored = rewards.isnan()
    order = order.masked_fill(unscored, 2.0)
    lowest = rewards.masked_fill(unscored, torch.inf).argmin(dim=1, keepdim=True)
    highest = rewards.masked_fill(unscored, -torch.inf).argmax(dim=1, keepdim=True)
    order = order.scatter(1, lowest, -1.0).scatter(1, highest, -2.0)
    return order.argsort(dim=1)[:, :m]
