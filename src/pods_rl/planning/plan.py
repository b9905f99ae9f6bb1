"""Which n and m have the most signal a second: a recommendation, and its text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .prices import Array, Prices
from .signal import Candidate, Pool, Simulated

LIMITS = """\
Limits: rewards are those of the policy now, and seconds those of this machine.
Signal ranks settings of equal rows at one learning rate. Check: pods compare."""
NO_INFORMATION = "No prompt has two different rewards, so these rollouts do not show the signal: keep GRPO."
BREAK_EVEN = 1.5
"""How many times fewer steps PODS 64 -> 16 needs than GRPO 16 to half of the word problems right (docs/results.md)."""

_RESAMPLES = 40  # of the prompts, for the interval of the gain
_STEPS_PER_RESAMPLE = 100
_PERCENTILES = (5, 50, 95)


@dataclass(frozen=True)
class Plan:
    """The candidates, plain GRPO first; the recommended one; why; and what was measured."""

    candidates: Sequence[Candidate]
    chosen: Candidate
    reason: str
    facts: Mapping[str, str]

    def lines(self) -> list[str]:
        """Return the plan as text of 80 columns."""
        lines: list[str] = []
        for name, text in self.facts.items():
            lines += _wrapped(text, f"{name:<12} ")
        lines += ["", _row("n -> m", "prompts", "rollouts", "dead", "signal", "s/step", "timed", "signal/s")]
        for candidate in self.candidates:
            lines.append(_row(*_cells(candidate)))
        lines += ["", *_wrapped(self.step_costs()), *LIMITS.splitlines()]
        lines += ["", *_wrapped(f"Recommended: {self.chosen.setting.label}. {self.reason}")]
        return lines

    def step_costs(self) -> str:
        """Return what a step of each timed n > m costs in steps of GRPO with the same m, and break-even.

        The seconds are timed where both settings were timed, else modelled. Empty if no n > m was timed.
        """
        grpo_of_m: dict[int, Candidate] = {}
        for candidate in self.candidates:
            if candidate.setting.n == candidate.setting.m:
                grpo_of_m[candidate.setting.m] = candidate
        costs = []
        for candidate in self.candidates:
            if candidate.times and candidate.setting.n > candidate.setting.m:
                ratio = _cost_ratio(candidate, grpo_of_m[candidate.setting.m])
                side = "above"
                if ratio < BREAK_EVEN:
                    side = "below"
                costs.append(f"{candidate.setting.label} {ratio:.2f} ({side})")
        if not costs:
            return ""
        return (
            f"Cost of a step, in steps of GRPO with n = m: {', '.join(costs)} break-even. In our study of word "
            f"problems PODS needed {BREAK_EVEN:g} times fewer steps, so it is sooner where this cost is lower."
        )


def _cost_ratio(candidate: Candidate, grpo: Candidate) -> float:
    if grpo.times:
        return candidate.seconds / grpo.seconds
    return candidate.modelled / grpo.modelled


def _cells(candidate: Candidate) -> list[str]:
    """Return the texts of a candidate's row in the table."""
    timed = ""
    if candidate.times:
        timed = f"{candidate.seconds:.3g}"
    return [
        candidate.setting.label,
        f"{candidate.work.prompts:g}",
        f"{candidate.work.rollouts:g}",
        f"{candidate.dead:.0%}",
        f"{candidate.signal:.2f}",
        f"{candidate.modelled:.3g}",
        timed,
        f"{candidate.rate:.3g}",
    ]


def _row(first: str, *cells: str) -> str:
    return f"{first:<12}" + "".join(f"{cell:>9}" for cell in cells)


def _wrapped(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=" " * len(first))


def decide(candidates: Sequence[Candidate], pool: Pool, simulated: Simulated, facts: Mapping[str, str]) -> Plan:
    """Recommend the timed setting with the most signal a second, if its gain over GRPO is above 1.

    That is: the 5th percentile of the gain over resampled prompts and timed seconds. Otherwise keep GRPO.
    """
    grpo = candidates[0]
    if not pool.live:
        return Plan(candidates, grpo, NO_INFORMATION, facts)
    timed = [candidate for candidate in candidates if candidate.times]
    best = max(timed, key=lambda candidate: candidate.rate)
    if best is grpo:
        return Plan(candidates, grpo, "No timed setting has more signal a second: keep GRPO.", facts)
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(_RESAMPLES):
        prompts = rng.integers(len(pool.counts_P), size=len(pool.counts_P))
        seed = int(rng.integers(2**31))
        best_rate = _resampled_rate(best, simulated, prompts, seed, rng)
        grpo_rate = _resampled_rate(grpo, simulated, prompts, seed, rng)
        if grpo_rate:
            gains.append(best_rate / grpo_rate)
        else:  # of prompts without a signal
            gains.append(1.0)
    low, middle, high = np.percentile(gains, _PERCENTILES)
    gain = f"{middle:.2f} times the signal a second of GRPO {grpo.setting.label} [{low:.2f}, {high:.2f}]"
    if low <= 1:
        return Plan(candidates, grpo, f"{best.setting.label} has {gain}: too uncertain, keep GRPO.", facts)
    return Plan(candidates, best, f"It has {gain}.", facts)


def _resampled_rate(
    candidate: Candidate, simulated: Simulated, prompts: Array, seed: int, rng: np.random.Generator
) -> float:
    """Return the signal a second for some of the prompts, with the seconds drawn within their standard error."""
    resampled = simulated(candidate.setting, steps=_STEPS_PER_RESAMPLE, seed=seed, among=prompts)
    standard_error = np.std(candidate.times, ddof=1) / len(candidate.times) ** 0.5
    error = standard_error / candidate.seconds
    timed_over_modelled = candidate.seconds / candidate.modelled
    scale = timed_over_modelled * max(1 + error * rng.normal(), 0.01)
    return float(resampled.signal / (scale * resampled.modelled))


def describe(pool: Pool, prices: Prices) -> dict[str, str]:
    """Return the observed rewards and the prices as lines.

    >>> describe(Pool([[1.0, 0.0], [0.0, 0.0]]), Prices())["rewards"]
    'mean 0.25 of 4 rollouts; 1 of 2 prompts have equal rewards'
    """
    prompts = len(pool.counts_P)
    dead = f"{prompts - pool.live} of {prompts} prompts have equal rewards"
    milliseconds = {
        "step": prices.step,
        "prompt": prices.prompt,
        "rollout": prices.rollout,
        "trained row": prices.row,
    }
    return {
        "rewards": f"mean {pool.rewards.mean():.2f} of {len(pool.rewards)} rollouts; {dead}",
        "prices, ms": ", ".join(f"{1000 * seconds:.3g} a {name}" for name, seconds in milliseconds.items()),
    }
