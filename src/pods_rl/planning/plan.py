"""Which n and m have the most signal a second: prices, simulated signal, and a recommendation. Does not import TRL.

**Signal.** E, the sum over prompts of k (m - k) / m with k of the m kept rows right, is the precision of the difference
between the mean gradients of right and wrong rows. The signal of a step is the square root of its E: the ratio of
signal to noise by which Adam moves at a fixed learning rate. For graded rewards, E is m times the variance of the kept
rewards, scaled to [0, 1]. Axes: P observed prompts, G groups of all simulated steps, N rollouts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..selection import Rule, select

Array = npt.NDArray[Any]

LIMITS = """\
Limits: rewards are those of the policy now, and seconds those of this machine.
Signal ranks settings of equal rows at one learning rate. Check: pods compare."""
NO_INFORMATION = "No prompt has two different rewards, so these rollouts do not show the signal: keep GRPO."
BREAK_EVEN = 1.5
"""How many times fewer steps PODS 64 -> 16 needs than GRPO 16 to half of the word problems right (docs/results.md)."""

_TIMES = (1, 2, 4, 8)  # n as a multiple of m
_FEWEST = 4  # rows of a prompt; with fewer, the advantages are noise
_STEPS, _RESAMPLES, _FEW_STEPS = 300, 40, 100


@dataclass(frozen=True)
class Setting:
    """n rollouts generated for a prompt, and m rows trained."""

    n: int
    m: int

    @property
    def label(self) -> str:
        return f"{self.n} -> {self.m}"

    @property
    def keys(self) -> dict[str, Any]:
        """Return the recipe keys."""
        return {"num_generations": self.m, "num_rollouts": self.n}


def settings_to_compare(own: Setting, rows: int) -> list[Setting]:
    """Return the settings that train `rows` rows a step, plain GRPO at the recipe's m first.

    m is the recipe's, a half, a quarter and twice that; n is 1, 2, 4 and 8 times m. Fewer rows of a prompt mean more
    prompts in a step.

    >>> [setting.label for setting in settings_to_compare(Setting(32, 8), 8)]
    ['8 -> 8', '16 -> 8', '32 -> 8', '64 -> 8', '4 -> 4', '8 -> 4', '16 -> 4', '32 -> 4']
    """
    sizes = [own.m, *(m for m in (own.m // 2, own.m // 4, 2 * own.m) if m >= _FEWEST and rows % m == 0)]
    return list(dict.fromkeys([*(Setting(m * times, m) for m in sizes for times in _TIMES), own]))


def to_measure(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings whose steps show the prices: few and many rollouts, few and many prompts.

    >>> [setting.label for setting in to_measure(settings_to_compare(Setting(32, 8), 8))]
    ['8 -> 8', '32 -> 8', '64 -> 8', '8 -> 4']
    """
    own = sorted((one for one in settings if one.m == settings[0].m), key=lambda one: one.n)
    small = sorted((one for one in settings if one.m == min(one.m for one in settings)), key=lambda one: one.n)
    return list(dict.fromkeys([own[0], own[len(own) // 2], own[-1], small[min(1, len(small) - 1)]]))


@dataclass(frozen=True)
class StepWork:
    """The prompts, rollouts, and rows with a gradient of a generation batch and its update."""

    prompts: float
    rollouts: float
    rows: float


@dataclass(frozen=True)
class Step:
    """The work of a measured step, the seconds of its generation and rewards, and those of the rest."""

    work: StepWork
    generation: float
    update: float

    @property
    def seconds(self) -> float:
        return self.generation + self.update


@dataclass(frozen=True)
class Prices:
    """Seconds of a step, and of each prompt, rollout and trained row in it; 0 if too small to measure."""

    step: float = 0.0
    prompt: float = 0.0
    rollout: float = 0.0
    row: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step.

        >>> Prices(step=1.0, rollout=0.5, row=0.25).seconds(StepWork(prompts=1, rollouts=4, rows=2))
        3.5
        """
        return self.step + self.prompt * work.prompts + self.rollout * work.rollouts + self.row * work.rows


def fit_prices(measured: Sequence[Sequence[Step]]) -> Prices:
    """Fit prices of at least 0 to the steps of several settings, by least squares of relative errors."""
    steps = [step for some in measured for step in some]
    weights = np.concatenate([np.full(len(some), 1 / np.median([s.seconds for s in some])) for some in measured])
    generated = [[1.0, step.work.prompts, step.work.rollouts] for step in steps]
    call, prompt, rollout = _non_negative(generated, [step.generation for step in steps], weights)
    step, row = _non_negative([[1.0, step.work.rows] for step in steps], [step.update for step in steps], weights)
    return Prices(call + step, prompt, rollout, row)


def _non_negative(features: Sequence[Sequence[float]], values: Sequence[float], weights: Array) -> list[float]:
    """Return weighted least-squares prices: as long as one is below 0, set the lowest to 0 and fit the others again."""
    features_RF, values_R = np.array(features) * weights[:, None], np.array(values) * weights
    fitted, prices = list(range(features_RF.shape[1])), np.zeros(features_RF.shape[1])
    while fitted:
        prices[:] = 0
        prices[fitted] = np.linalg.lstsq(features_RF[:, fitted], values_R, rcond=None)[0]
        if (prices >= 0).all():
            break
        fitted.remove(int(prices.argmin()))
    return [float(price) for price in prices]


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
        scored = [rewards for group in groups if (rewards := [x for x in group if np.isfinite(x)])]
        self.counts_P = np.array([len(rewards) for rewards in scored], dtype=int)
        self._starts_P = self.counts_P.cumsum() - self.counts_P
        self.rewards = np.array([x for rewards in scored for x in rewards])
        self.live = sum(min(rewards) < max(rewards) for rewards in scored)  # prompts whose rewards differ

    def draw(self, count: int, n: int, rng: np.random.Generator, among: Array | None = None) -> Tensor:
        """Return the rewards of n rollouts of random prompts, `[count, n]`; `among`: the prompts to draw from."""
        prompts_G = rng.choice(np.arange(len(self.counts_P)) if among is None else among, size=count)
        counts_G1, starts_G1 = self.counts_P[prompts_G][:, None], self._starts_P[prompts_G][:, None]
        own_GN = starts_G1 + rng.integers(counts_G1, size=(count, n))
        any_GN = rng.integers(len(self.rewards), size=(count, n))
        return torch.from_numpy(self.rewards[np.where(rng.random((count, n)) * (counts_G1 + 1) < 1, any_GN, own_GN)])


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
        return float(np.mean(self.times)) if self.times else self.modelled

    @property
    def rate(self) -> float:
        """Signal a second."""
        return self.signal / max(self.seconds, 1e-9)


Simulated = Callable[..., Candidate]  # `simulate` with a pool, prices and rows


def simulate(
    setting: Setting, pool: Pool, prices: Prices, rows: int, rule: str | Rule = "max_variance", *,
    steps: int = _STEPS, seed: int = 0, among: Array | None = None,
) -> Candidate:  # fmt: skip
    """Simulate steps of `rows` rows with the rule that training uses; `among`: the prompts to draw from."""
    rng, prompts = np.random.default_rng(seed), rows // setting.m
    rewards_GN = pool.draw(steps * prompts, setting.n, rng, among)
    if setting.n > setting.m:
        generator = torch.Generator().manual_seed(seed)
        rewards_GN = rewards_GN.gather(1, select(rewards_GN, setting.m, rule, generator=generator).indices)
    precision_G = rewards_GN.var(dim=1, correction=0) * setting.m / (np.ptp(pool.rewards) or 1.0) ** 2
    live = float((precision_G > 1e-12).double().mean())
    signal = float(precision_G.view(steps, prompts).sum(dim=1).sqrt().mean())
    work = StepWork(prompts, prompts * setting.n, rows * live)
    return Candidate(setting, work, signal, prices.seconds(work))


@dataclass(frozen=True)
class Plan:
    """The candidates, plain GRPO first; the recommended one; why; and what was measured."""

    candidates: Sequence[Candidate]
    chosen: Candidate
    reason: str
    facts: Mapping[str, str]

    def lines(self) -> list[str]:
        """Return the plan as text of 80 columns."""
        lines = [line for name, text in self.facts.items() for line in _wrapped(text, f"{name:<12} ")]
        lines += ["", _row("n -> m", "prompts", "rollouts", "dead", "signal", "s/step", "timed", "signal/s")]
        for one in self.candidates:
            seconds = (f"{one.modelled:.3g}", f"{one.seconds:.3g}" if one.times else "", f"{one.rate:.3g}")
            signal = (f"{one.work.prompts:g}", f"{one.work.rollouts:g}", f"{one.dead:.0%}", f"{one.signal:.2f}")
            lines.append(_row(one.setting.label, *signal, *seconds))
        verdict = f"Recommended: {self.chosen.setting.label}. {self.reason}"
        return [*lines, "", *_wrapped(self.step_costs()), *LIMITS.splitlines(), "", *_wrapped(verdict)]

    def step_costs(self) -> str:
        """Return what a step of each timed n > m costs in steps of GRPO with the same m, and break-even.

        The seconds are timed where both settings were timed, else modelled. Empty if no n > m was timed.
        """
        grpo = {one.setting.m: one for one in self.candidates if one.setting.n == one.setting.m}
        costs = []
        for one in self.candidates:
            if one.times and one.setting.n > one.setting.m:
                base = grpo[one.setting.m]
                ratio = one.seconds / base.seconds if base.times else one.modelled / base.modelled
                costs.append(f"{one.setting.label} {ratio:.2f} ({'below' if ratio < BREAK_EVEN else 'above'})")
        if not costs:
            return ""
        return (
            f"Cost of a step, in steps of GRPO with n = m: {', '.join(costs)} break-even. In our study of word "
            f"problems PODS needed {BREAK_EVEN:g} times fewer steps, so it is sooner where this cost is lower."
        )


def _row(first: str, *cells: str) -> str:
    return f"{first:<12}" + "".join(f"{cell:>9}" for cell in cells)


def _wrapped(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=" " * len(first))


def decide(candidates: Sequence[Candidate], pool: Pool, simulated: Simulated, facts: Mapping[str, str]) -> Plan:
    """Recommend the timed setting with the most signal a second, if its gain over GRPO is above 1.

    That is: the 5th percentile of the gain over resampled prompts and timed seconds. Otherwise keep GRPO.
    """
    base = candidates[0]
    if not pool.live:
        return Plan(candidates, base, NO_INFORMATION, facts)
    best = max((one for one in candidates if one.times), key=lambda one: one.rate)
    if best is base:
        return Plan(candidates, base, "No timed setting has more signal a second: keep GRPO.", facts)
    rng, gains = np.random.default_rng(0), []
    for _ in range(_RESAMPLES):
        among, seed, rates = rng.integers(len(pool.counts_P), size=len(pool.counts_P)), int(rng.integers(2**31)), []
        for one in (best, base):
            found = simulated(one.setting, steps=_FEW_STEPS, seed=seed, among=among)
            error = np.std(one.times, ddof=1) / len(one.times) ** 0.5 / one.seconds
            scale = one.seconds / one.modelled * max(1 + error * rng.normal(), 0.01)
            rates.append(found.signal / (scale * found.modelled))
        gains.append(rates[0] / rates[1] if rates[1] else 1.0)
    low, middle, high = np.percentile(gains, [5, 50, 95])
    gain = f"{middle:.2f} times the signal a second of GRPO {base.setting.label} [{low:.2f}, {high:.2f}]"
    if low <= 1:
        return Plan(candidates, base, f"{best.setting.label} has {gain}: too uncertain, keep GRPO.", facts)
    return Plan(candidates, best, f"It has {gain}.", facts)


def describe(pool: Pool, prices: Prices) -> dict[str, str]:
    """Return the observed rewards and the prices as lines.

    >>> describe(Pool([[1.0, 0.0], [0.0, 0.0]]), Prices())["rewards"]
    'mean 0.25 of 4 rollouts; 1 of 2 prompts have equal rewards'
    """
    dead = f"{len(pool.counts_P) - pool.live} of {len(pool.counts_P)} prompts have equal rewards"
    prices_ms = ", ".join(f"{1000 * seconds:.3g} a {name}" for name, seconds in vars(prices).items())
    return {
        "rewards": f"mean {pool.rewards.mean():.2f} of {len(pool.rewards)} rollouts; {dead}",
        "prices, ms": prices_ms.replace("a row", "a trained row"),
    }
