"""Which rows a batch trains where some groups teach nothing: shared, refilled, as many as the rarer reward has.

Pure functions of rewards, batched over prompts; NaN marks a rollout that is not scored or was not generated.
Axes: P groups, N rollouts, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..selection import Rule, is_constant, select
from ..selection.types import check_rewards


def live(rewards_PN: Tensor) -> Tensor:
    """Return whether each group's scored rewards differ, bool `[P]`: only then it has a gradient.

    Pass the answer's rewards where a task has them: shaped parts alone would keep a group alive.

    >>> live(torch.tensor([[0.0, 1.0], [1.0, 1.0], [float("nan"), 1.0]]))
    tensor([ True, False, False])
    """
    return ~is_constant(check_rewards(rewards_PN)[0])


def share_rows(rewards_PN: Tensor, m: int) -> Tensor:
    """Return the rows of each group, int64 `[P]`, with the places of dead groups given to live ones; P x m in all.

    Live groups keep their m rows and get further ones in pairs, a pair for each group in turn from the first on, up to
    2 min(right, wrong) rows: a balanced set of rows. Equal rows lower the sum of the prompts' variances most. Dead
    groups keep what no live group can use.

    Args:
        rewards_PN: `[P, N]`; see `sides` for what counts as right and wrong.
        m: rows of each group before sharing, at most its generated rollouts.

    >>> share_rows(torch.tensor([[0.0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]), 2)
    tensor([4, 0, 2])
    """
    low_P, high_P = sides(rewards_PN)
    live_P = live(rewards_PN)
    pairs_P = ((2 * torch.minimum(low_P, high_P) - m) // 2).clamp(min=0) * live_P
    places = int((~live_P).sum()) * m
    # Full rounds first: the most pairs for each such that all fit; then one more for the first groups that can use it.
    rounds_R = torch.arange(int(pairs_P.max()) + 1 if len(pairs_P) else 1, device=pairs_P.device)
    fits_R = torch.minimum(pairs_P.unsqueeze(1), rounds_R).sum(dim=0) * 2 <= places
    given_P = pairs_P.clamp(max=int(fits_R.sum()) - 1)
    wants_P = pairs_P > given_P
    given_P = given_P + (wants_P & (wants_P.cumsum(0) <= places // 2 - given_P.sum()))
    left = places - 2 * int(given_P.sum())
    dead_P = (left - ((~live_P).cumsum(0) - 1) * m).clamp(0, m)
    return torch.where(live_P, m + 2 * given_P, dead_P)


def row_weights(rows_P: Tensor, m: int) -> Tensor:
    """Return the weight of each group's rows, float64 `[P]`: m / rows, so that a mean over rows weighs prompts equally.

    Groups without rows get 1.

    >>> row_weights(torch.tensor([4, 0, 2]), 2)
    tensor([0.5000, 1.0000, 1.0000], dtype=torch.float64)
    """
    return torch.where(rows_P > 0, m / rows_P.clamp(min=1).double(), 1.0)


def select_rows(
    rewards_PN: Tensor, rows_P: Tensor, rule: str | Rule = "max_variance", generator: torch.Generator | None = None
) -> list[Tensor]:
    """Return the kept rollouts of each group, P tensors of its own number of rows, ascending.

    Args:
        rewards_PN: `[P, N]`.
        rows_P: rows of each group, 0 to n; the rule runs once for each number that occurs, on all groups that have it.
        rule, generator: as `selection.select`.

    >>> select_rows(torch.tensor([[0.0, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([4, 0]))
    [tensor([0, 1, 2, 3]), tensor([], dtype=torch.int64)]
    """
    kept: list[Tensor] = [torch.zeros(0, dtype=torch.int64, device=rewards_PN.device)] * len(rewards_PN)
    for rows in sorted({int(rows) for rows in rows_P.tolist()} - {0}):
        groups = (rows_P == rows).nonzero().flatten()
        chosen = select(rewards_PN[groups], rows, rule, generator=generator).indices.sort(dim=1).values
        for group, indices in zip(groups.tolist(), chosen, strict=True):
            kept[group] = indices
    return kept


def sides(rewards_PN: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many scored rewards of each group are low and how many high, int64 `[P]` each.

    High are those above the middle between the group's own least and greatest reward, low those below; one in the
    middle is neither. Rewards of two values split into wrong and right; a dead group has none of either.

    >>> sides(torch.tensor([[0.0, 1.0, 0.5, 0.9, float("nan")]]))
    (tensor([1]), tensor([2]))
    """
    rewards_PN, _ = check_rewards(rewards_PN)
    least_P1 = rewards_PN.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    most_P1 = rewards_PN.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    middle_P1 = least_P1 / 2 + most_P1 / 2
    spread_P1 = least_P1 < most_P1
    return tuple((side & spread_P1).sum(dim=1) for side in (rewards_PN < middle_P1, rewards_PN > middle_P1))  # type: ignore[return-value]


def rows_auto(rewards_PN: Tensor, m: int, multiple: float) -> tuple[Tensor, Tensor]:
    """Return how many rows each group trains, int64 `[P]`, and how many of them from the high end, int64 `[P]`.

    All rows of the rarer side, k, and round(multiple x k) of the other or all that it has; both fewer, in the same
    proportion, where that passes m. A dead group trains none. `keep_ends` finds the rows.

    Args:
        rewards_PN: `[P, N]`, of all rollouts or of those kept; see `sides` for the sides.
        m: rows of a group at most.
        multiple: rows of the commoner side for each of the rarer, at least 0.

    >>> rows_auto(torch.tensor([[0.0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]), 4, 2.0)
    (tensor([3, 0]), tensor([1, 0]))
    """
    low_P, high_P = sides(rewards_PN)
    rarer_P, other_P = torch.minimum(low_P, high_P), torch.maximum(low_P, high_P)
    others_P = torch.minimum((multiple * rarer_P).round().long(), other_P)
    k_P = torch.minimum(rarer_P, (m * rarer_P // (rarer_P + others_P).clamp(min=1)).clamp(min=1))
    others_P = torch.minimum((others_P * k_P / rarer_P.clamp(min=1)).round().long(), m - k_P)
    return k_P + others_P, torch.where(high_P <= low_P, k_P, others_P)


def keep_ends(rewards_PN: Tensor, rows_P: Tensor, k_P: Tensor) -> Tensor:
    """Return which rollouts are among the k highest or the rows - k lowest scored ones, bool `[P, N]`.

    Ties: the lower rollout index first, at both ends.

    >>> keep_ends(torch.tensor([[0.0, 0, 0, 1, 0, 0]]), torch.tensor([3]), torch.tensor([1]))
    tensor([[ True,  True, False,  True, False, False]])
    """
    rewards_PN, _ = check_rewards(rewards_PN)
    lowest_PN = rewards_PN.nan_to_num(nan=torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    highest_PN = rewards_PN.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    low_P = rows_P - k_P
    return ((lowest_PN < low_P.unsqueeze(1)) | (highest_PN < k_P.unsqueeze(1))) & ~rewards_PN.isnan()


def distinct_first(labels_PN: Tensor) -> Tensor:
    """Return an order of each group's rollouts, int64 `[P, N]`: first occurrences, then second ones, and so on.

    The rule keeps the first of equal rewards, so rewards in this order keep different texts first:
    `order.gather(1, select(rewards.gather(1, order), m).indices)`.

    Biased: given the rewards, kept rollouts are no longer independent draws of the policy. Of s rollouts of a reward, a
    text of probability p is kept first with probability 1 - (1 - p)^s and not in proportion to p, so rare texts
    weigh more in the gradient: right ones are pushed up and wrong ones down more than their share.

    Args:
        labels_PN: whole numbers, equal within a group where two rollouts have the same tokens.

    >>> distinct_first(torch.tensor([[7, 7, 5, 7, 5, 6]]))
    tensor([[0, 2, 5, 1, 4, 3]])
    """
    sorted_PN, order_PN = labels_PN.sort(dim=1, stable=True)
    rank_PN = torch.arange(labels_PN.shape[1], device=labels_PN.device) - torch.searchsorted(sorted_PN, sorted_PN)
    return torch.zeros_like(order_PN).scatter_(1, order_PN, rank_PN).argsort(dim=1, stable=True)


@dataclass
class Refill:
    """Further prompts for the places of dead groups: the data set in a shuffled order of its own, pass after pass.

    Its only state is `drawn`: after a resume with the same number it continues with the same prompts. On every process
    it gives the same prompts, if each asks for all of a batch's places.

    Args:
        seed: the run's.
        size: prompts in the data set.
        drawn: prompts given so far.

    >>> refill = Refill(seed=0, size=4)
    >>> first, then = refill.prompts(3), refill.prompts(3)
    >>> sorted(first + then[:1])
    [0, 1, 2, 3]
    >>> Refill(seed=0, size=4, drawn=3).prompts(3) == then
    True
    """

    seed: int
    size: int
    drawn: int = 0

    def prompts(self, count: int) -> list[int]:
        """Return the data set's indices of the next `count` prompts."""
        found: list[int] = []
        while len(found) < count:
            done, place = divmod(self.drawn, self.size)
            # Seeded apart from the sampler of the training data, which takes the seed itself.
            generator = torch.Generator().manual_seed(hash((self.seed, done, 1)) % 2**63)
            some = torch.randperm(self.size, generator=generator)[place : place + count - len(found)].tolist()
            found += some
            self.drawn += len(some)
        return found
