"""The signal of n and m, simulated with the rewards that were observed.

E = k (m - k) / m, with k of the m kept rows of a prompt right, is the precision of the difference between the mean
gradients of its right and wrong rows. For graded rewards, E is m times the variance of the kept rewards, scaled to
[0, 1].

Prompts also differ in what they teach, so that one prompt is a poor sample of the task however exact its gradient is.
With a variance b between prompts, in the unit of 1 / E, a prompt counts 1 / (b + 1 / E). The signal of a step is the
square root of the sum over its prompts: the ratio of signal to noise by which Adam moves at a fixed learning rate. How
much a step learns is predicted by a power of it.

The constants come from our studies of word problems: `benchmarks/planner.py` computes them, and docs/results.md
compares predictions with what was measured. Axes: P observed prompts, G groups of all simulated steps, N rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..selection import Rule, select
from .prices import Array, Prices, Setting, StepWork


class Model(NamedTuple):
    """How much a step learns by the rewards of its kept rows.

    Args:
        between: the variance between prompts of what they teach, in the unit of 1 / E.
        exponent: the power of the signal that predicts how much a step learns.
        error: how far a comparison may be from the prediction: one standard deviation of the logarithm of the steps
            that an arm saves.
    """

    between: float
    exponent: float
    error: float


MODEL = Model(between=5.5, exponent=1.18, error=0.39)
"""Fitted to our studies of word problems.

These are 0.12 from predictions that are fitted to the others. The error here is the one on sums, because a user's task
is another task too: how much prompts differ in what they teach depends on it.
"""

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
    """A setting and a mean step of it.

    Args:
        setting: n and m.
        work: what the step computes.
        signal: what it can learn from.
        learning: how much it is predicted to learn, in a unit that all settings share.
        modelled: its seconds by the prices.
        times: the seconds of steps that were timed.
    """

    setting: Setting
    work: StepWork
    signal: float
    learning: float
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
    def speed(self) -> float:
        """What is predicted to be learned in a second."""
        return self.learning / max(self.seconds, 1e-9)


class Simulated(Protocol):
    """`simulate` with a pool, prices and rows."""

    def __call__(
        self, setting: Setting, *, steps: int = ..., seed: int = ..., among: Array | None = ...
    ) -> Candidate: ...


def precisions(
    setting: Setting, pool: Pool, rows: int, rule: str | Rule = "max_variance", *,
    steps: int = _STEPS, seed: int = 0, among: Array | None = None,
) -> Array:  # fmt: skip
    """Return E of each prompt of simulated steps of `rows` rows, ``[steps, prompts]``.

    The rule is the one that training uses. `among`: the prompts of the pool to draw from.
    """
    prompts = rows // setting.m
    rng = np.random.default_rng(seed)
    rewards_GN = pool.draw(steps * prompts, setting.n, rng, among)
    if setting.n > setting.m:
        generator = torch.Generator().manual_seed(seed)
        kept = select(rewards_GN, setting.m, rule, generator=generator)
        rewards_GN = rewards_GN.gather(1, kept.indices)
    spread = np.ptp(pool.rewards) or 1.0
    precision_G = rewards_GN.var(dim=1, correction=0) * setting.m / spread**2
    return precision_G.view(steps, prompts).numpy()


def signal_of(precision: Array, between: float) -> float:
    """Return the mean signal of steps, from E of their prompts, ``[steps, prompts]``.

    >>> signal_of(np.array([[1.0, 1.0]]), between=0.0), signal_of(np.array([[1.0, 0.0]]), between=3.0)
    (1.4142135623730951, 0.5)
    """
    counted = precision / (1 + between * precision)  # 1 / (b + 1 / E), also for E = 0
    return float(np.sqrt(counted.sum(axis=1)).mean())


def simulate(
    setting: Setting, pool: Pool, prices: Prices, rows: int, rule: str | Rule = "max_variance", *,
    steps: int = _STEPS, seed: int = 0, among: Array | None = None, model: Model = MODEL,
) -> Candidate:  # fmt: skip
    """Simulate steps of `rows` rows, as `precisions` does."""
    precision = precisions(setting, pool, rows, rule, steps=steps, seed=seed, among=among)
    signal = signal_of(precision, model.between)
    live_share = float((precision > _LEAST_PRECISION).mean())
    prompts = rows // setting.m
    work = StepWork(prompts, prompts * setting.n, rows * live_share)
    return Candidate(setting, work, signal, signal**model.exponent, prices.seconds(work))
