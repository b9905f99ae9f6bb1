"""When a group needs no further rollouts: a pure function of its first rewards, by rollout number.

Whoever generates in waves asks after each wave, for the groups that are still open. T: rollouts generated so far.

What stops a group may depend on rewards and rollout numbers alone. Given the rewards, the kept rollouts are then
independent draws of the policy given theirs, as with a fixed n. Rollouts must be counted by number and never by
finishing order: short completions finish first, so the first to finish are not a fair sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import UserError
from ..selection import is_constant, select
from ..selection.types import check_rewards
from .sampling import uniforms

# The rule takes variances this near, as a share, for equal; a share of the variance is certified as closely.
TOLERANCE = 1e-9
# Rewards are at an end of the range if they differ from it by the rounding of a sum: so many units of their own type.
ROUNDING = 8
# In the place of a rollout's number in the key of a draw, so that no rollout has the same draws.
ROULETTE = 2**32 - 1


class Status(IntEnum):
    """Whether a group generates further, or what stopped it."""

    OPEN = 0
    DECIDED = 1
    GAVE_UP = 2
    FULL = 3

    @property
    def label(self) -> str:
        """The name for tables: open, decided, gave up, full."""
        return self.name.lower().replace("_", " ")


def wave_sizes(waves: Sequence[int], n: int, m: int) -> tuple[int, ...]:
    """Return the sizes of all waves, n in all: those given, the last one repeated, and the final one cut to fit.

    Args:
        waves: sizes of at least 1; the first at least m, so that every group can fill its m places.
        n: rollouts that a group generates at most.
        m: rollouts kept of each group.

    Raises:
        UserError: no sizes, sizes that are not whole numbers of at least 1, or a first wave below m.

    >>> wave_sizes([16, 8], 64, 16)
    (16, 8, 8, 8, 8, 8, 8)
    >>> wave_sizes([16, 30, 30], 64, 16)
    (16, 30, 18)
    """
    if not waves or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in waves):
        raise UserError(
            f"rollout_waves must be whole numbers of at least 1: got {list(waves)!r}. "
            f"Set for example [{m}, {max(1, m // 2)}], or null to generate all at once."
        )
    if waves[0] < min(m, n):
        raise UserError(
            f"the first of rollout_waves must be at least num_generations, the rollouts that are kept: got {waves[0]} "
            f"and {m}. Set it to {m} or more."
        )
    sizes: list[int] = []
    while sum(sizes) < n:
        sizes.append(min(waves[min(len(sizes), len(waves) - 1)], n - sum(sizes)))
    return tuple(sizes)


def wave_end(schedule: Sequence[int], rollouts: int) -> int:
    """Return how many rollouts exist at the end of the wave that brings a group to `rollouts` at least.

    `Stopping.give_up_after` must be such a number: else rollouts of the same wave that differ would be thrown away.

    >>> wave_end((16, 8, 8), 20), wave_end((16, 8, 8), 16)
    (24, 16)
    """
    return next(end for end in accumulate(schedule) if end >= rollouts)


def roulette_draws(key: Sequence[int], prompts: Sequence[int]) -> Tensor:
    """Return one uniform draw in [0, 1) for each prompt, float32 `[P]`, for `Stopping.statuses`.

    Args:
        key: what comes before the prompt in the key of a rollout's draws: seed, generation.
        prompts: the prompts' numbers in the generation, over all processes.
    """
    return torch.tensor([uniforms((*key, prompt, ROULETTE), 1)[0] for prompt in prompts], dtype=torch.float32)


@dataclass(frozen=True)
class Stopping:
    """When a group of at most n rollouts, of which max_variance keeps m, stops.

    Args:
        m: rollouts kept of each group.
        n: rollouts that a group generates at most.
        share: of the greatest variance still possible, in (0, 1], that decides a group (`stop_variance`).
        low: the least reward possible; None: no group is decided, it can only be given up.
        high: the greatest.
        give_up_after: a group whose first rollouts, so many, have equal rewards is given up; None: never. A wave must
            end there (`wave_end`).
        give_up_probability: with this probability, in (0, 1]; below 1 survivors have a weight (`weights`).

    Raises:
        UserError: a value outside these ranges, or one end of the range alone.

    >>> stopping = Stopping(m=4, n=16, low=0.0, high=1.0, give_up_after=6)
    >>> rewards = torch.tensor([[0.0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
    >>> stopping.statuses(rewards).tolist()
    [1, 0, 2]
    """

    m: int
    n: int
    share: float = 1.0
    low: float | None = None
    high: float | None = None
    give_up_after: int | None = None
    give_up_probability: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"stop_variance must lie above 0 and up to 1: got {self.share}. 1.0 keeps the same rows.")
        if not 0 < self.give_up_probability <= 1:
            raise UserError(
                f"give_up_probability must lie above 0 and up to 1: got {self.give_up_probability}. "
                "1.0 gives up always; to never give up, set give_up_after to null."
            )
        if self.give_up_after is not None and not self.m <= self.give_up_after <= self.n:
            raise UserError(
                "give_up_after must be at least num_generations and at most num_rollouts: "
                f"got {self.give_up_after}, {self.m} and {self.n}."
            )
        low, high = self.low, self.high
        if (low, high) != (None, None) and (low is None or high is None or not -math.inf < low < high < math.inf):
            raise UserError(
                f"reward_range must be two finite numbers, the lower first: got {[low, high]}. "
                "Set the least and the greatest total reward, or null."
            )

    def statuses(self, rewards_PT: Tensor, draws_P: Tensor | None = None) -> Tensor:
        """Return each group's `Status` after its first T rollouts, int64 `[P]`.

        A group is DECIDED if V >= share x U. V is the variance of the m that max_variance keeps of the first T, and U
        the greatest that it can keep of all n, whatever the other n - T rewards are. So V >= share x V_n on every path
        (to a relative 1e-9, the rule's own tolerance).

        With share 1 the kept rollouts are those of the full n, index by index. V = U needs every kept reward at an end
        of the range, half at each; for odd m, with the rule's ties, one more at the high end. So the test counts
        rewards at the ends, at least ceil(m / 2) high and floor(m / 2) low, and no rounding enters. m = 1 always uses
        this test.

        A group is GAVE_UP if its first `give_up_after` scored rewards are equal and its draw lies below
        `give_up_probability`. These rewards and the draw never change, so a group that survives once survives after
        every later wave: nothing needs to be remembered. DECIDED comes before GAVE_UP, and T = n is always FULL.

        Rewards of classes: where the total has shaped parts, pass the answer's rewards and their range instead. Then
        the share of *their* variance is certified; the rule still selects by the total, among those generated.

        Args:
            rewards_PT: `[P, T]` of groups that nothing has stopped yet, rollout t in column t; NaN where a rollout
                was generated and not scored. Below m scored rewards no group is decided.
            draws_P: the groups' `roulette_draws`; needed if `give_up_probability` is below 1.

        Raises:
            UserError: a reward outside [low, high]. Rewards this near an end count as equal: 8 roundings of their type.
            ValueError: no draws where they are needed, or more than n rollouts.
        """
        rewards_PT, _ = check_rewards(rewards_PT)
        generated = rewards_PT.shape[1]
        if generated > self.n:
            raise ValueError(f"a group has at most n = {self.n} rollouts; got {generated}.")
        status_P = torch.full((len(rewards_PT),), int(Status.OPEN), device=rewards_PT.device)
        if generated == self.n or generated < self.m:
            return status_P.fill_(int(Status.FULL)) if generated == self.n else status_P
        equal_P = self._equal(rewards_PT)
        if equal_P is not None:
            status_P[equal_P & (self._draws(draws_P, equal_P) < self.give_up_probability)] = int(Status.GAVE_UP)
        if self.low is not None:
            status_P[self._decided(rewards_PT)] = int(Status.DECIDED)
        return status_P

    def weights(self, rewards_PT: Tensor, draws_P: Tensor | None = None) -> Tensor:
        """Return each group's weight in the loss, float64 `[P]`: 1 / (1 - give_up_probability) if it survived, else 1.

        A group whose first `give_up_after` rewards are equal contributes nothing with probability rho, and 1 / (1 -
        rho) times its gradient otherwise: the expectation is that of never giving up. With give_up_probability 1 there
        are no survivors and no weights; giving up then lowers the weight of hard and of easy prompts.

        Args:
            rewards_PT, draws_P: as `statuses`, at any T.

        >>> stopping = Stopping(m=2, n=8, give_up_after=2, give_up_probability=0.75)
        >>> stopping.weights(torch.tensor([[0.0, 0, 1], [0, 1, 1], [0, 0, 0]]), torch.tensor([0.8, 0.8, 0.1]))
        tensor([4., 1., 1.], dtype=torch.float64)
        """
        equal_P = self._equal(rewards_PT)
        ones_P = torch.ones(len(rewards_PT), dtype=torch.float64, device=rewards_PT.device)
        if equal_P is None or self.give_up_probability == 1:
            return ones_P
        survived_P = equal_P & (self._draws(draws_P, equal_P) >= self.give_up_probability)
        return ones_P.masked_fill(survived_P, 1 / (1 - self.give_up_probability))

    def replay(
        self, rewards_PN: Tensor, schedule: Sequence[int], draws_P: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return how many of its n rollouts each group would have generated, `[P]`, and what stopped it, `[P]`.

        Args:
            rewards_PN: `[P, N]` of groups generated whole, for example from a ledger.
            schedule: `wave_sizes`, n in all.
            draws_P: as `statuses`.
        """
        status_P = torch.zeros(len(rewards_PN), dtype=torch.int64, device=rewards_PN.device)
        generated_P = torch.zeros_like(status_P)
        for end in accumulate(schedule):
            open_P = status_P == int(Status.OPEN)
            generated_P = torch.where(open_P, end, generated_P)
            status_P = torch.where(open_P, self.statuses(rewards_PN[:, :end], draws_P), status_P)
        return generated_P, status_P

    def _equal(self, rewards_PT: Tensor) -> Tensor | None:
        """Whether the first `give_up_after` scored rewards are equal, `[P]`; None before there are so many."""
        first = self.give_up_after
        return None if first is None or rewards_PT.shape[1] < first else is_constant(rewards_PT[:, :first])

    def _draws(self, draws_P: Tensor | None, like_P: Tensor) -> Tensor:
        if self.give_up_probability == 1:
            return torch.zeros(len(like_P), device=like_P.device)
        if draws_P is None or draws_P.shape != like_P.shape:
            raise ValueError("give_up_probability below 1 needs one draw for each group: see roulette_draws.")
        return draws_P.to(like_P.device)

    def _decided(self, rewards_PT: Tensor) -> Tensor:
        low, high = rewards_PT.new_tensor([self.low, self.high]).double().tolist()
        rounding = ROUNDING * torch.finfo(rewards_PT.dtype).eps * max(abs(low), abs(high))
        outside = rewards_PT[(rewards_PT < low - rounding) | (rewards_PT > high + rounding)]
        if len(outside):
            raise UserError(
                f"reward_range must hold every reward: got a reward of {outside[0].item():g} and the range "
                f"[{self.low:g}, {self.high:g}]. Groups that stopped before it may have stopped wrongly. "
                "Set reward_range to the least and the greatest reward, or to null."
            )
        right_PT, wrong_PT = rewards_PT >= high - rounding, rewards_PT <= low + rounding
        at_ends_P = (right_PT.sum(dim=1) >= (self.m + 1) // 2) & (wrong_PT.sum(dim=1) >= self.m // 2)
        if self.share == 1 or self.m == 1:
            return at_ends_P
        enough_P = (~rewards_PT.isnan()).sum(dim=1) >= self.m
        scaled_PT = (rewards_PT.double() - low) / (high - low) * 2 - 1
        scaled_PT = scaled_PT.masked_fill(right_PT, 1).masked_fill(wrong_PT, -1)
        kept_PM = scaled_PT.gather(1, select(rewards_PT, self.m).indices).nan_to_num(nan=0.0)
        most_P = greatest_variance(scaled_PT, self.m, self.n - rewards_PT.shape[1])
        reached_P = kept_PM.var(dim=1, correction=0) >= self.share * most_P * (1 - TOLERANCE)
        return at_ends_P | (enough_P & reached_P)


def greatest_variance(rewards_PT: Tensor, m: int, left: int) -> Tensor:
    """Return U, the greatest variance (ddof = 0) of m of a group's rewards once `left` more in [-1, 1] came, `[P]`.

    The variance of fixed m rewards is convex in each of them, and U is the greatest of these over all choices of m, so
    convex too: it is greatest with every further reward at -1 or 1. The best m are then the highest and lowest, so the
    optimum has `up` new rewards at 1, `down` at -1, and of the others the `top` highest and the lowest; all (up, top)
    are tried, at most (m + 1)^2, from running sums.

    Args:
        rewards_PT: `[P, T]`, float64 in [-1, 1], NaN where unscored; at least m scored, or the result means nothing.
        m: rewards kept.
        left: further rewards, at least 1.

    >>> greatest_variance(torch.tensor([[-1.0, -1, -1, 0.0]], dtype=torch.float64), 4, 1)
    tensor([0.7500], dtype=torch.float64)
    """
    rewards_PT = rewards_PT.double()
    scored = ~rewards_PT.isnan()
    high_PM = rewards_PT.masked_fill(~scored, -2).sort(dim=1, descending=True).values[:, :m]
    low_PM = rewards_PT.masked_fill(~scored, 2).sort(dim=1).values[:, :m]
    high_PK, low_PK = (torch.nn.functional.pad(ends, (1, 0)) for ends in (high_PM, low_PM))
    up_U1 = torch.arange(min(left, m) + 1, device=rewards_PT.device).unsqueeze(1)
    k_K = torch.arange(m + 1, device=rewards_PT.device)  # kept from the high end, new ones included
    down_UK = torch.minimum(left - up_U1, m - k_K)
    top_UK, bottom_UK = (k_K - up_U1).clamp(min=0), (m - k_K) - down_UK
    sum_PUK = high_PK.cumsum(1)[:, top_UK] + low_PK.cumsum(1)[:, bottom_UK] + (up_U1 - down_UK)
    square_PUK = high_PK.square().cumsum(1)[:, top_UK] + low_PK.square().cumsum(1)[:, bottom_UK] + (up_U1 + down_UK)
    variance_PUK = square_PUK / m - (sum_PUK / m).square()
    return variance_PUK.masked_fill(up_U1 > k_K, -1.0).flatten(1).amax(dim=1)
