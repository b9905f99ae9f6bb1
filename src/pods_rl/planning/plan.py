"""Which n and m learn fastest by the signal that they have: a recommendation, and its text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from .prices import Array, Prices, Setting
from .signal import MODEL, Candidate, Model, Pool, Simulated

LEGEND = """\
n -> m: of each prompt n rollouts are generated and m are trained. No signal:
prompts whose m rewards are equal, which teach nothing. Signal: what a step can
learn from, by its prompts and the spread of their rewards. Gain: how many times
as fast as GRPO it would learn, by its signal and its seconds. From, to: a 90 %
interval, which includes how far our own studies were from such predictions
(docs/results.md).
Limits: rewards are those of the policy now, and seconds those of this machine.
All settings train equally many rows per step, at one learning rate. Check the
choice with: pods compare."""
NO_INFORMATION = "No prompt has two different rewards, so these rollouts do not show the signal: keep GRPO."

_RESAMPLES = 40  # of the prompts, for the interval of the gain
_STEPS_PER_RESAMPLE = 100
_PERCENTILES = (5, 50, 95)


@dataclass(frozen=True)
class Gain:
    """How many times as fast as plain GRPO a timed setting is predicted to learn: a 90 % interval and its median."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Plan:
    """The candidates, plain GRPO first; the recommended one; why; what was measured; and gains of timed settings.

    The recommended setting is the timed one with the highest `low` of its gain; that of plain GRPO is 1.
    """

    candidates: Sequence[Candidate]
    chosen: Candidate
    reason: str
    facts: Mapping[str, str]
    gains: Mapping[Setting, Gain] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the plan as text of 80 columns."""
        lines: list[str] = []
        for name, text in self.facts.items():
            lines += _wrapped(text, f"{name:<12} ")
        lines += ["", "Modelled with these prices, only to choose what to time:"]
        lines.append(_row("n -> m", "prompts", "rollouts", "no signal", "signal", "s per step", "gain"))
        lines += (_row(*_modelled_cells(candidate, self.candidates[0])) for candidate in self.candidates)
        lines += ["", *self._timed_lines(), ""]
        if self.step_costs():
            lines += [*_wrapped(self.step_costs()), ""]
        lines += [*LEGEND.splitlines(), ""]
        lines += [*_wrapped(f"Recommended: {self.chosen.setting.label}. {self.reason}")]
        return lines

    def _timed_lines(self) -> list[str]:
        """Return the table of the timed settings, the recommended one first."""
        grpo = self.candidates[0]
        timed = [candidate for candidate in self.candidates if candidate.times]
        timed.sort(key=lambda candidate: self._low(candidate), reverse=True)
        lines = [f"Timed here, and the gain in speed over GRPO {grpo.setting.label}:"]
        lines.append(_row("n -> m", "s per step", "gain from", "median", "to"))
        for candidate in timed:
            cells = [candidate.setting.label, f"{candidate.seconds:.3g}"]
            gain = self.gains.get(candidate.setting)
            if gain is not None:
                cells += [f"{gain.low:.2f}", f"{gain.median:.2f}", f"{gain.high:.2f}"]
            elif candidate is grpo:
                cells += ["1.00"] * 3
            line = _row(*cells)
            if candidate is self.chosen:
                line += "  recommended"
            lines.append(line)
        return lines

    def _low(self, candidate: Candidate) -> float:
        """Return the least gain of a timed setting; 1 of plain GRPO, and 0 if it is unknown."""
        if candidate is self.candidates[0]:
            return 1.0
        gain = self.gains.get(candidate.setting)
        if gain is None:
            return 0.0
        return gain.low

    def step_costs(self) -> str:
        """Return what a step of each n > m costs, and so how many steps it must save to pay off.

        Only where the setting and GRPO with the same m were both timed. Empty if there is none.
        """
        grpo_of_m: dict[int, Candidate] = {}
        for candidate in self.candidates:
            if candidate.times and candidate.setting.n == candidate.setting.m:
                grpo_of_m[candidate.setting.m] = candidate
        costs = []
        for candidate in self.candidates:
            setting = candidate.setting
            if not candidate.times or setting.n == setting.m or setting.m not in grpo_of_m:
                continue
            ratio = candidate.seconds / grpo_of_m[setting.m].seconds
            costs.append(f"one of {setting.label} takes {ratio:.2f} times as long")
        if not costs:
            return ""
        return (
            f"Compared with a step of GRPO with the same m, {' and '.join(costs)}. A setting pays off only if it saves "
            "more steps than that."
        )


def _modelled_cells(candidate: Candidate, grpo: Candidate) -> list[str]:
    """Return the texts of a candidate's row in the table of what is modelled."""
    learning = candidate.learning / max(grpo.learning, 1e-9)
    longer = candidate.modelled / max(grpo.modelled, 1e-9)
    return [
        candidate.setting.label,
        f"{candidate.work.prompts:g}",
        f"{candidate.work.rollouts:g}",
        f"{candidate.dead:.0%}",
        f"{candidate.signal:.2f}",
        f"{candidate.modelled:.3g}",
        f"{learning / max(longer, 1e-9):.2f}",
    ]


def _row(first: str, *cells: str) -> str:
    return f"{first:<12}" + "".join(f"{cell:>11}" for cell in cells)


def _wrapped(text: str, first: str = "") -> list[str]:
    """Return lines of 80 columns, which do not break a setting such as `64 -> 16`."""
    unbroken = text.replace(" -> ", "\xa0->\xa0")
    lines = textwrap.wrap(unbroken, 80, initial_indent=first, subsequent_indent=" " * len(first))
    return [line.replace("\xa0", " ") for line in lines]


def decide(
    candidates: Sequence[Candidate],
    pool: Pool,
    simulated: Simulated,
    facts: Mapping[str, str],
    model: Model = MODEL,
) -> Plan:
    """Recommend the timed setting whose gain over plain GRPO is surely highest, if it is above 1. Else keep GRPO.

    Surely: the 5th percentile of the gain over resampled prompts, timed seconds and errors of the model.
    """
    grpo = candidates[0]
    if not pool.live:
        return Plan(candidates, grpo, NO_INFORMATION, facts)
    others = [candidate for candidate in candidates if candidate.times and candidate is not grpo]
    gains = _gains(grpo, others, pool, simulated, model.error)
    kept = f"GRPO {grpo.setting.label}"
    if not others:
        return Plan(candidates, grpo, f"Nothing but {kept} was timed.", facts)
    best = max(others, key=lambda candidate: gains[candidate.setting].low)
    gain = gains[best.setting]
    if gain.low > 1:
        reason = (
            f"It is predicted to learn at least {gain.low:.2f} times as fast as {kept}, probably {gain.median:.2f}."
        )
        return Plan(candidates, best, reason, facts, gains)
    if max(gains[candidate.setting].median for candidate in others) <= 1:
        reason = f"No other timed setting is predicted to learn faster than {kept}."
        return Plan(candidates, grpo, reason, facts, gains)
    reason = (
        f"This is plain GRPO. It is not certain that another setting is faster: {best.setting.label} is predicted to "
        f"learn {gain.low:.2f} to {gain.high:.2f} times as fast. Only pods compare can settle it."
    )
    return Plan(candidates, grpo, reason, facts, gains)


def _gains(
    grpo: Candidate, others: Sequence[Candidate], pool: Pool, simulated: Simulated, error: float
) -> dict[Setting, Gain]:
    """Return the gain over plain GRPO of each timed setting, over resampled prompts, timed seconds and model errors."""
    rng = np.random.default_rng(0)
    ratios: dict[Setting, list[float]] = {candidate.setting: [] for candidate in others}
    # Quantiles in random order, not draws: the interval then varies less with so few resamples.
    normal = NormalDist(0, error)
    quantiles = [normal.inv_cdf((number + 0.5) / _RESAMPLES) for number in range(_RESAMPLES)]
    errors = {candidate.setting: np.exp(rng.permutation(quantiles)) for candidate in others}
    for number in range(_RESAMPLES):
        prompts = rng.integers(len(pool.counts_P), size=len(pool.counts_P))
        seed = int(rng.integers(2**31))
        grpo_speed = _resampled_speed(grpo, simulated, prompts, seed, rng)
        for candidate in others:
            speed = _resampled_speed(candidate, simulated, prompts, seed, rng)
            ratio = speed / grpo_speed if grpo_speed else 1.0  # prompts without a signal
            ratios[candidate.setting].append(ratio * errors[candidate.setting][number])
    gains = {}
    for setting, of_setting in ratios.items():
        low, median, high = np.percentile(of_setting, _PERCENTILES)
        gains[setting] = Gain(float(low), float(median), float(high))
    return gains


def _resampled_speed(
    candidate: Candidate, simulated: Simulated, prompts: Array, seed: int, rng: np.random.Generator
) -> float:
    """Return the speed of learning for some of the prompts, with the seconds drawn within their standard error."""
    resampled = simulated(candidate.setting, steps=_STEPS_PER_RESAMPLE, seed=seed, among=prompts)
    standard_error = np.std(candidate.times, ddof=1) / len(candidate.times) ** 0.5
    error = standard_error / candidate.seconds
    timed_over_modelled = candidate.seconds / candidate.modelled
    scale = timed_over_modelled * max(1 + error * rng.normal(), 0.01)
    return float(resampled.learning / (scale * resampled.modelled))


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
