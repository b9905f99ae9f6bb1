"""The signal of n and m, simulated with the rewards that were observed.

E, the sum over prompts of k (m - k) / m with k of the m kept rows right, is the precision of the difference between the
mean gradients of right and wrong rows. The signal of a step is the square root of its E: the ratio of signal to noise
by which Adam moves at a fixed learning rate. For graded rewards, E is m times the variance of the kept rewards, scaled
to [0, 1]. Axes: P observed prompts, G groups of all simulated steps, N rollouts.

How much a step learns is predicted by a power of its signal. `EXPONENT` and `MODEL_ERROR` come from our studies of word
problems: `benchmarks/planner.py` computes them, and docs/results.md compares what they predict with what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..selection import Rule, select
from .prices import Array, Prices, Setting, StepWork

EXPONENT = 0.9
"""The power of the signal that predicts how much a step learns: twice the signal saves less than half of the steps."""

MODEL_ERROR = 0.22
"""How far a study was from that prediction: the standard deviation of the logarithm of the steps that it saved."""

_STEPS = 300  # simulated for each setting
_LEAST_PRECISION = 1e-12  # of a group with a signal; below it is rounding


class Pool:
    """The observed rewards of some prompts, from which groups of any size are drawn.

    A drawn reward is one of the prompt's own or, with a chance of one in the number of its rollouts plus 1, one of any
    prompt: 0 of 8 right does not prove a pass rate of 0.

    Args:
        groups: the rewards of each prompt. NaN (no reward) is dropped, and so is a prompt without rewards.

    >>> Pool([[1.0, 0.0], [0.0, float("nan")]]).rewards.tolist()
    [1.0, 0.0, 0.0]
    """

    def __init__(self, groups: Sequence[Sequence[float]]) -> None:
        rewards: list[float] = []
        counts: list[int] = []
        self.live = 0  # prompts whose rewards differ
        for group in groups:
            scored = [reward for reward in group if np.isfinite(reward)]
            if not scored:
                continue
            rewards.extend(scored)
            counts.append(len(scored))
            if min(scored) < max(scored):
                self.live += 1
        self.rewards = np.array(rewards)
        self.counts_P = np.array(counts, dtype=int)
        self._starts_P = self.counts_P.cumsum() - self.counts_P

    def draw(self, count: int, n: int, rng: np.random.Generator, among: Array | None = None) -> Tensor:
        """Return the rewards of n rollouts of random prompts, `[count, n]`; `among`: the prompts to draw from."""
        prompts = np.arange(len(self.counts_P)) if among is None else among
        prompts_G = rng.choice(prompts, size=count)
        counts_G1 = self.counts_P[prompts_G][:, None]
        starts_G1 = self._starts_P[prompts_G][:, None]
        of_prompt_GN = starts_G1 + rng.integers(counts_G1, size=(count, n))
        of_any_GN = rng.integers(len(self.rewards), size=(count, n))
        draws_any_GN = rng.random((count, n)) * (counts_G1 + 1) < 1
        return torch.from_numpy(self.rewards[np.where(draws_any_GN, of_any_GN, of_prompt_GN)])


@dataclass(frozen=True)
class Candidate:
    """A setting, the work and the signal of a mean step of it, and the step's seconds: modelled, and timed ones."""

    setting: Setting
    work: StepWork
    signal: float
    modelled: float
    times: tuple[float, ...] = ()

    @property
    def dead(self) -> float:
        """The share of groups without a signal."""
        return 1 - self.work.rows / (self.work.prompts * self.setting.m)

    @property
    def seconds(self) -> float:
        """The mean of the timed seconds, or else the modelled ones."""
        if self.times:
            return float(np.mean(self.times))
        return self.modelled

    @property
    def learning(self) -> float:
        """Return how much a step is predicted to learn, in a unit that all settings share."""
        return self.signal**EXPONENT

    @property
    def speed(self) -> float:
        """What is predicted to be learned in a second."""
        return self.learning / max(self.seconds, 1e-9)


class Simulated(Protocol):
    """`simulate` with a pool, prices and rows."""

    def __call__(
        self, setting: Setting, *, steps: int = ..., seed: int = ..., among: Array | None = ...
    ) -> Candidate: ...


def simulate(
    setting: Setting, pool: Pool, prices: Prices, rows: int, rule: str | Rule = "max_variance", *,
    steps: int = _STEPS, seed: int = 0, among: Array | None = None,
) -> Candidate:  # fmt: skip
    """Simulate steps of `rows` rows with the rule that training uses; `among`: the prompts to draw from."""
    prompts = rows // setting.m
    rng = np.random.default_rng(seed)
    rewards_GN = pool.draw(steps * prompts, setting.n, rng, among)
    if setting.n > setting.m:
        generator = torch.Generator().manual_seed(seed)
        kept = select(rewards_GN, setting.m, rule, generator=generator)
        rewards_GN = rewards_GN.gather(1, kept.indices)
    spread = np.ptp(pool.rewards) or 1.0
    precision_G = rewards_GN.var(dim=1, correction=0) * setting.m / spread**2
    live_share = float((precision_G > _LEAST_PRECISION).double().mean())
    signal = float(precision_G.view(steps, prompts).sum(dim=1).sqrt().mean())
    work = StepWork(prompts, prompts * setting.n, rows * live_share)
    return Candidate(setting, work, signal, prices.seconds(work))
