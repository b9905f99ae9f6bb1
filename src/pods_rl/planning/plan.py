"""A plan: the modelled signal and seconds of each setting, the times of the best ones, and the recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .costs import Costs
from .grid import Setting
from .signal import Array, Batches, Pool, Simulated, simulate

FINALISTS = 3
_SHOWN = 10  # rows of the table
_ABOUT_AS_GOOD = 0.95  # of the best signal a second; the plan picks the simplest setting above this
_DISAGREE = 0.3  # between modelled and timed seconds
_STEPS, _FEW_STEPS = 300, 100  # simulated: of each setting, and of each resample


@dataclass(frozen=True)
class Candidate:
    """A setting, what a step of it does on average, and its seconds: modelled, and timed for the best.

    `prompts` is the number of prompts a step, so that all settings train the same rows.
    """

    setting: Setting
    prompts: int
    expected: Simulated
    seconds: float
    timed: float | None = None
    steps: int = 0  # timed
    error: float = 0.0  # relative standard error of the timed seconds

    @property
    def rate(self) -> float:
        """Signal a second, of timed seconds where there are any."""
        return self.expected.signal / max(self.timed or self.seconds, 1e-9)

    def record(self) -> dict[str, Any]:
        return {
            "setting": self.setting.keys, "prompts": self.prompts, "signal": self.expected.signal,
            "dead": self.expected.dead, "precision": self.expected.precision, "work": asdict(self.expected.work),
            "seconds_modelled": self.seconds, "seconds_timed": self.timed, "steps_timed": self.steps,
            "signal_a_second": self.rate,
        }  # fmt: skip


def model(settings: Sequence[Setting], pool: Pool, batches: Batches, costs: Costs) -> list[Candidate]:
    """Simulate settings, in order, and predict their seconds."""
    found = []
    for setting in settings:
        expected = simulate(setting, pool, batches, steps=_STEPS)
        prompts = batches.rows // setting.num_generations
        found.append(Candidate(setting, prompts, expected, costs.seconds(expected.work)))
    return found


def finalists(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first, which is plain GRPO, and the best three, each of other n and m."""
    base, *others = candidates
    taken = {(base.setting.num_rollouts, base.setting.num_generations)} if base.setting.parts == 0 else set()
    best: list[Candidate] = []
    for one in sorted(others, key=lambda one: -one.rate):
        pair = (one.setting.num_rollouts, one.setting.num_generations)
        if len(best) < FINALISTS and (pair not in taken or not best):
            best.append(one)
            taken.add(pair)
    return [base, *best]


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in both modelled seconds and signal, quickest first."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.seconds, -one.expected.signal)):
        if not found or one.expected.signal > found[-1].expected.signal:
            found.append(one)
    return found


@dataclass(frozen=True)
class Plan:
    """The measurements, the model, the timings, and the recommended setting.

    Args:
        base: plain GRPO at the recipe's m.
        candidates: all settings, modelled.
        timed: the finalists, GRPO first; without timing the modelled ones.
        best: of them.
        chosen: the recommended one.
        gain: of the chosen, or of the best where GRPO is kept, over GRPO in signal a second: 5th and 95th percentile
            over resampled prompts and timed seconds.
        facts: what was measured, as lines: a name and a text.
        notes: further lines, such as settings left out.
    """

    base: Candidate
    candidates: Sequence[Candidate]
    timed: Sequence[Candidate]
    best: Candidate
    chosen: Candidate
    gain: tuple[float, float]
    costs: Costs
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """The recipe keys of the recommended setting."""
        return self.chosen.setting.keys

    @property
    def reasons(self) -> list[str]:
        """Return why, as sentences."""
        one, base = self.chosen, self.base
        how = "timed" if base.timed else "modelled"
        low, high = self.gain
        if one is base:
            if self.best is base:
                return [f"No setting has more signal a {how} second than GRPO {base.setting.label}."]
            return [
                f"{self.best.setting.label} has {_gain(self.best, base):.2f} times the signal a {how} second of GRPO "
                f"[{low:.2f}, {high:.2f}]: too little, or too uncertain, to leave GRPO."
            ]
        cost = (one.timed or one.seconds) / (base.timed or base.seconds)
        return [
            f"A step costs {cost:.2f} steps of GRPO {base.setting.label} ({how}), its signal is "
            f"{one.expected.signal / base.expected.signal:.2f} times as large (modelled).",
            f"Groups without signal: {one.expected.dead:.0%} instead of {base.expected.dead:.0%} (modelled).",
            f"Signal a second: {_gain(one, base):.2f} times GRPO's [{low:.2f}, {high:.2f}].",
        ]

    def record(self) -> dict[str, Any]:
        """Return the plan as plain data, for `plan.json` of a run."""
        return {
            "recommended": self.keys, "label": self.chosen.setting.label, "reasons": self.reasons,
            "measured": dict(self.facts), "seconds": asdict(self.costs), "notes": list(self.notes),
            "gain_90_percent": list(self.gain),
            "timed": [one.record() for one in self.timed], "modelled": [one.record() for one in self.candidates],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return the plan as text of 80 columns."""
        lines = [line for name, text in self.facts.items() for line in _wrapped(text, f"{name:<14} ")]
        shown = sorted(frontier(self.candidates), key=lambda one: -one.rate)[:_SHOWN]
        shown = sorted({one.setting: one for one in (self.base, *shown)}.values(), key=lambda one: one.seconds)
        lines += ["", "Modelled: GRPO, and settings that no other beats in both seconds and signal", _HEAD]
        most = max(one.rate for one in shown) or 1.0
        for one in shown:
            mark = "GRPO " if one.setting == self.base.setting else ""
            rollouts, dead, bar = one.expected.work.rollouts, one.expected.dead, "#" * round(8 * one.rate / most)
            lines.append(
                f"{mark + one.setting.label:<41}{one.prompts:>4}{rollouts:>6.0f}{dead:>6.0%}{one.seconds:>7.3g}"
                f"{one.expected.signal:>7.2f} {bar}".rstrip()
            )
        if self.base.timed:
            lines += ["", "Timed: GRPO and the best three", _TIMED]
            lines += [
                f"{one.setting.label:<41}{one.seconds:>7.3g}{one.timed or 0:>7.3g}{one.steps:>6}{one.rate:>17.3g}"
                for one in self.timed
            ]
        chosen = self.chosen
        keep = ": keep GRPO" if chosen is self.base else f", {chosen.prompts} prompt{'s' * (chosen.prompts > 1)} a step"
        text = [*self.notes, f"Recommended: {chosen.setting.label}{keep}", *self.reasons]
        return [*lines, "", *(line for one in text for line in _wrapped(one))]


_HEAD = f"{'n -> m':<41}{'P':>4}{'gen.':>6}{'dead':>6}{'s/step':>7}{'signal':>7} a second"
_TIMED = f"{'n -> m':<41}{'model':>7}{'timed':>7}{'steps':>6}{'signal a second':>17}"


def _wrapped(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=" " * len(first))


def _gain(one: Candidate, base: Candidate) -> float:
    return one.rate / base.rate if base.rate else float("inf")


def decide(
    candidates: Sequence[Candidate],
    timed: Sequence[Candidate],
    pool: Pool,
    batches: Batches,
    costs: Costs,
    *,
    facts: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan: the simplest timed setting that is about as good as the best, if it surely beats GRPO.

    Surely: in 95 of 100 resamples of prompts and timed seconds its signal a second is above that of GRPO, the first
    of the timed.
    """
    base, best = timed[0], max(timed, key=lambda one: one.rate)
    good = [one for one in timed if one.rate >= _ABOUT_AS_GOOD * best.rate]
    chosen = min(good, key=lambda one: (one.setting.parts, -one.rate))
    compared = best if chosen is base else chosen
    gain = (1.0, 1.0) if compared is base else interval(_gain_over(compared, base, pool, batches, costs), pool)
    if gain[0] <= 1:
        best, chosen = compared, base
    apart = max(abs(one.seconds / one.timed - 1) if one.timed else 0.0 for one in timed)
    if apart > _DISAGREE:
        notes = [
            *notes,
            f"Modelled and timed seconds differ by up to {apart:.0%}: the machine may not have been quiet.",
        ]
    return Plan(base, candidates, timed, best, chosen, gain, costs, facts, notes)


def _gain_over(one: Candidate, base: Candidate, pool: Pool, batches: Batches, costs: Costs) -> Callable[[Array], float]:
    """Return the gain in signal a second on given prompts; timed seconds scale the modelled ones, with their error."""

    noise = np.random.default_rng(0)

    def gain(among: Array) -> float:
        found, seed = [], int(noise.integers(2**31))
        for candidate in (one, base):
            expected = simulate(candidate.setting, pool, batches, steps=_FEW_STEPS, seed=seed, among=among)
            scale = (candidate.timed or candidate.seconds) / candidate.seconds * (1 + candidate.error * noise.normal())
            found.append(replace(candidate, expected=expected, timed=scale * costs.seconds(expected.work)))
        return min(_gain(*found), 1e9)

    return gain


def describe_pool(pool: Pool) -> dict[str, str]:
    """Return what the sampled prompts say about pass rates, as a line.

    >>> from .signal import Observed
    >>> describe_pool(Pool([Observed(0, 1.0, 1.0, 1), Observed(0, 0.0, 0.0, 2), Observed(1, 0.0, 0.0, 3)]))["prompts"]
    '2 sampled, 3 rollouts'
    """

    def mean(among: Array) -> float:
        return float(pool.right_Q[among].sum() / pool.rollouts_Q[among].sum())

    low, high = interval(mean, pool, resamples=200)
    everyone = np.arange(pool.prompts)
    rates = pool.rates(np.tile(everyone, 2000 // pool.prompts + 1), np.random.default_rng(0))
    return {
        "prompts": f"{pool.prompts} sampled, {pool.rollouts_Q.sum()} rollouts",
        "pass rates": f"mean {mean(everyone):.2f} [{low:.2f}, {high:.2f}]; {(rates < 0.1).mean():.0%} of prompts below "
        f"0.1, {(rates > 0.9).mean():.0%} above 0.9",
    }


def describe_costs(costs: Costs) -> dict[str, str]:
    """Return the prices as lines.

    >>> describe_costs(Costs(call=0.05, rollout=0.001, step=0.02, row=0.002))["generation"]
    '50 ms a call, 0 a prompt, 1 a rollout (rewards: 0)'
    """
    ms = {name: f"{1000 * value:.3g}" for name, value in asdict(costs).items()}
    return {
        "generation": f"{ms['call']} ms a call, {ms['prompt']} a prompt, {ms['rollout']} a rollout "
        f"(rewards: {ms['reward']})",
        "update": f"{ms['step']} ms a step, {ms['group']} a prompt, {ms['row']} a row",
    }


def interval(of: Callable[[Array], float], pool: Pool, *, resamples: int = 40, seed: int = 0) -> tuple[float, float]:
    """Return the 5th and 95th percentile of a statistic over resampled prompts: what the sample of prompts leaves open.

    Args:
        of: the statistic, given the prompts of one resample.
    """
    rng = np.random.default_rng(seed)
    found = [of(rng.integers(pool.prompts, size=pool.prompts)) for _ in range(resamples)]
    low, high = np.percentile(found, [5, 95])
    return float(low), float(high)
