"""Over all logged rollouts of an arm: rewards of kept and dropped ones, and which prompts are dead, live or solved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from .groups import Group

_BINS = 24


@dataclass(frozen=True)
class Bin:
    """Rollouts with a reward from low to high, and their share of the fullest bin of the arm, in percent."""

    low: float
    high: float
    kept: int
    dropped: int
    kept_height: float
    dropped_height: float


@dataclass
class Tally:
    """What an arm's groups add up to."""

    label: str
    rewards: list[float] = field(default_factory=list)  # NaN: unscored
    kept: list[bool] = field(default_factory=list)
    prompts: dict[bytes, tuple[int, int, bool]] = field(default_factory=dict)  # right, rollouts, whether all level
    has_right: bool = False
    groups: int = 0

    def add(self, group: Group) -> None:
        self.groups += 1
        self.rewards += [rollout.reward for rollout in group.rollouts]
        self.kept += [rollout.kept for rollout in group.rollouts]
        self.has_right |= group.right is not None
        key = sha256(group.prompt.encode()).digest()
        right, count, level = self.prompts.get(key, (0, 0, True))
        self.prompts[key] = (right + (group.right or 0), count + len(group.rollouts), level and group.is_level)

    @property
    def classes(self) -> dict[str, int]:
        """Prompts by class: dead (never right), live, solved (always right).

        Without a reward that tells right from wrong, dead are those whose rewards never differed in a group.

        >>> Tally("pods", prompts={b"a": (0, 4, True), b"b": (1, 4, False), b"c": (4, 4, True)}, has_right=True).classes
        {'dead': 1, 'live': 1, 'solved': 1}
        """
        found = Counter(
            prompt_class(right if self.has_right else None, count, level=level)
            for right, count, level in self.prompts.values()
        )
        return {name: found[name] for name in ("dead", "live", "solved")}

    def bins(self, low: float, high: float) -> list[Bin]:
        """The histogram of the scored rewards between two ends."""
        rewards, kept = np.array(self.rewards, dtype=float), np.array(self.kept, dtype=bool)
        edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
        taken, left = (np.histogram(rewards[chosen], edges)[0] for chosen in (kept, ~kept))
        most = max(int((taken + left).max(initial=0)), 1)
        return [
            Bin(float(a), float(b), int(k), int(d), 100 * k / most, 100 * d / most)
            for a, b, k, d in zip(edges, edges[1:], taken, left, strict=False)
        ]


def prompt_class(right: int | None, count: int, *, level: bool) -> str:
    """Return dead, live or solved for a prompt with so many right rollouts of a count.

    Args:
        right: None: no reward tells.
        count: rollouts of all its groups.
        level: whether no group had a spread of rewards.

    >>> prompt_class(0, 4, level=False), prompt_class(2, 4, level=True), prompt_class(None, 4, level=True)
    ('dead', 'live', 'dead')
    """
    if right is None:
        return "dead" if level else "live"
    return "dead" if right == 0 else "solved" if right == count else "live"


def reward_ends(tallies: Sequence[Tally]) -> tuple[float, float]:
    """The least and the greatest reward of all arms; NaN if there is none."""
    rewards = [reward for tally in tallies for reward in tally.rewards if not math.isnan(reward)]
    return min(rewards, default=math.nan), max(rewards, default=math.nan)
