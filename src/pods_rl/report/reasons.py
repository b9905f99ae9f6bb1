"""Why rollouts were kept: what the rule chose, what that gained, and what ended generation; from the ledger alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .arms import rollouts_of
from .curves import finite
from .text import number, plain

_OTHER_RULES = {
    "random": "chosen at random",
    "percentile": "at evenly spaced quantiles of the rewards",
}
_STOPS = {
    "decided": "decided: those left could not raise the variance of the best {m} enough",
    "gave up": "given up: the first rewards were all equal",
}
NOTE = (
    "Variances are sample variances (divisor: count − 1). A random choice of m of the n rollouts has, on average, the "
    "variance of all n, so the ratio of the two variances is what the rule gained."
)


@dataclass(frozen=True)
class Settings:
    """What an arm's recipe says about its rollouts; None or empty where it says nothing."""

    rule: str = ""
    n: int | None = None
    m: int | None = None
    length: int | None = None  # tokens of a completion at most
    dead_groups: str = "keep"
    answer: str = "accuracy"  # the reward that tells right from wrong

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        n, m = rollouts_of(config)
        length = finite(config.get("max_completion_length"))
        return cls(
            rule=plain(config.get("rule") or ""),
            n=n,
            m=m,
            length=None if length is None else int(length),
            dead_groups=str(config.get("dead_groups") or "keep"),
            answer=str(config.get("answer_reward") or "accuracy"),
        )


def ends_of(rewards: Sequence[float], kept: Sequence[float]) -> tuple[int, int] | None:
    """Return how many of the highest and of the lowest rewards were kept; None if others were.

    Where equal rewards allow several answers: the most balanced one, then the one with more high rewards, as the
    rule `max_variance` breaks ties.

    >>> ends_of([0.0, 1, 0.5, 1, 0, 0.4], [1, 0, 1, 0]), ends_of([1, 2, 3, 4], [3, 4]), ends_of([1, 2, 3], [2])
    ((2, 2), (2, 0), None)
    """
    every, chosen = sorted(rewards), sorted(kept)
    m = len(chosen)
    low = next((i for i in range(m) if every[i] != chosen[i]), m)
    high = next((i for i in range(m) if every[-1 - i] != chosen[-1 - i]), m)
    if low + high < m:
        return None
    k = min(max((m + 1) // 2, m - low), high)
    return k, m - k


def variance(values: Sequence[float]) -> float:
    """The sample variance; NaN below two values."""
    return float(np.var(values, ddof=1)) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Reasons:
    """Why a group's rollouts were kept or dropped.

    Args:
        settings: of the arm.
        rewards: of all generated rollouts; NaN: unscored.
        kept: whether each was kept.
        stopped: what stopped its waves; empty without waves.
        waves: how many it took; 0: unknown.
        drawn: whether the group was drawn in the place of a dead one.
    """

    settings: Settings
    rewards: Sequence[float]
    kept: Sequence[bool]
    stopped: str = ""
    waves: int = 0
    drawn: bool = False

    @cached_property
    def _scored(self) -> list[float]:
        return sorted(reward for reward in self.rewards if not math.isnan(reward))

    @cached_property
    def _chosen(self) -> list[float]:
        return [r for r, kept in zip(self.rewards, self.kept, strict=True) if kept and not math.isnan(r)]

    @cached_property
    def _ends(self) -> tuple[int, int] | None:
        return ends_of(self._scored, self._chosen)

    @property
    def is_level(self) -> bool:
        """Whether all scored rewards are equal, so that the group teaches nothing."""
        return not self._scored or self._scored[0] == self._scored[-1]

    def lines(self) -> list[str]:
        """Sentences on the group.

        >>> Reasons(Settings("max_variance", 6, 4), [0, 0, 0, 1, 1, 0], [True, True, False, True, True, False]).lines()
        ['max_variance kept the 2 highest and the 2 lowest of 6 rewards.', 'Variance of the kept rewards 0.333, of a \
random choice of 4 on average 0.267: 1.25 times.']
        """
        return [*self._generation(), *self._choice()]

    def _generation(self) -> list[str]:
        lines = ["Drawn in the place of a group without spread (dead_groups: refill)."] if self.drawn else []
        count, why = len(self.rewards), _STOPS.get(self.stopped)
        if why:
            waves = f" in {self.waves} wave{'s' * (self.waves > 1)}" if self.waves else ""
            of = f" of {self.settings.n}" if self.settings.n is not None else ""
            lines.append(f"Generated {count}{of}{waves}; {why.format(m=self.settings.m or 'm')}.")
        unscored = count - len(self._scored)
        if unscored:
            lines.append(f"{unscored} of {count} rollouts have no reward: kept only where scored ones are too few.")
        return lines

    def _choice(self) -> list[str]:
        count, kept, m = len(self.rewards), sum(self.kept), self.settings.m
        if not kept:
            gone = {"refill": ": a further prompt was drawn in its place", "share": ": live groups took its places"}
            return [f"None kept{gone.get(self.settings.dead_groups, '')}."]
        if kept == count:
            lines = [f"All {count} kept: no down-sampling."]
        elif self.is_level:
            lines = [f"All rewards are equal: the first {kept} were kept."]
        else:
            rule = self.settings.rule or "The rule"
            lines = [f"{rule} kept {self._which(kept)} of {len(self._scored)} rewards."]
        if self.is_level:
            return [*lines, "Without spread every advantage is 0: this group teaches nothing."]
        if m is not None and kept > m and self.settings.dead_groups == "share":
            lines.append(f"{kept - m} of these rows are places of groups without spread.")
        ours, random = variance(self._chosen), variance(self._scored)
        if kept < count and random > 0 and not math.isnan(ours):
            lines.append(
                f"Variance of the kept rewards {number(ours)}, of a random choice of {len(self._chosen)} on average "
                f"{number(random)}: {ours / random:.2f} times."
            )
        return lines

    def _which(self, kept: int) -> str:
        if self.settings.rule in _OTHER_RULES:
            return f"{kept} {_OTHER_RULES[self.settings.rule]},"
        if self._ends is None:
            return str(kept)
        high, low = self._ends
        return " and ".join([*([f"the {high} highest"] * (high > 0)), *([f"the {low} lowest"] * (low > 0))])

    def of_rollout(self, reward: float, kept: bool) -> str:
        """Why one rollout was kept or dropped; empty where only the rule knows.

        >>> found = Reasons(Settings("max_variance", 4, 2), [0, 0.5, 1, 1], [True, False, True, False])
        >>> found.of_rollout(1, True), found.of_rollout(1, False), found.of_rollout(0.5, False)
        ('one of the 1 highest', 'equal to kept ones, later number', 'between the kept ends')
        """
        if math.isnan(reward):
            return "no reward"
        if all(self.kept) or self.is_level or self._ends is None or self.settings.rule in _OTHER_RULES:
            return ""
        high, low = self._ends
        top = self._scored[len(self._scored) - high] if high else math.inf
        bottom = self._scored[low - 1] if low else -math.inf
        if kept:
            return f"one of the {high} highest" if reward >= top else f"one of the {low} lowest"
        if reward >= top or reward <= bottom:
            return "equal to kept ones, later number"
        return "between the kept ends" if high and low else "beyond the kept end"


def ending(tokens: int | None, limit: int | None, *, open_call: bool = False) -> str:
    """What ended a completion, as far as its length tells.

    Args:
        tokens: of the completion.
        limit: `max_completion_length`.
        open_call: whether its last message calls a tool and has no answer.

    >>> ending(12, 56), ending(56, 56), ending(12, None), ending(12, 56, open_call=True)
    ('ended itself', 'length limit', '', 'call unanswered: limit of tool rounds or of length')
    """
    if open_call:
        return "call unanswered: limit of tool rounds or of length"
    if tokens is None or limit is None:
        return ""
    return "length limit" if tokens >= limit else "ended itself"
