"""What a step costs by the work it does: a linear model, fitted to measured steps. No torch.

Work is counted, seconds are measured: calls of the generator, prompts and rollouts in them; groups and rows that the
update computes. Prices are at least 0, so a price that the measurements cannot tell from nothing is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_OUTLIER = 4.0  # times the median of its setting: another program took the machine


@dataclass(frozen=True)
class Work:
    """What a generation batch does, or does on average; `groups` and `rows` are those whose passes are computed."""

    calls: float
    prompts: float  # over all calls
    rollouts: float
    groups: float
    rows: float


@dataclass(frozen=True)
class Measured:
    """One generation batch of real training: what it did, and the seconds of its parts."""

    work: Work
    generation: float
    reward: float
    rest: float  # selection, update, and what lies between steps

    @property
    def seconds(self) -> float:
        return self.generation + self.reward + self.rest


@dataclass(frozen=True)
class Costs:
    """Seconds: of a generation call, of each prompt and rollout in it, of a reward; of a step, group and row."""

    call: float = 0.0
    prompt: float = 0.0
    rollout: float = 0.0
    reward: float = 0.0
    step: float = 0.0
    group: float = 0.0
    row: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step.

        >>> Costs(call=1.0, rollout=0.5, row=0.25).seconds(Work(calls=1, prompts=1, rollouts=4, groups=1, rows=2))
        3.5
        """
        generation = self.call * work.calls + self.prompt * work.prompts
        rollouts = (self.rollout + self.reward) * work.rollouts
        return generation + rollouts + self.step + self.group * work.groups + self.row * work.rows


def fit_costs(measured: Sequence[Sequence[Measured]]) -> Costs:
    """Fit the prices to steps of several settings, with relative errors of equal weight; at least one step of each.

    Args:
        measured: the steps of each setting.
    """
    kept = [typical(steps) for steps in measured]
    steps = [step for some in kept for step in some]
    weights = np.concatenate([np.full(len(some), 1 / np.mean([s.seconds for s in some])) for some in kept])
    work = [step.work for step in steps]
    generation = non_negative(
        np.array([[w.calls, w.prompts, w.rollouts] for w in work]), np.array([s.generation for s in steps]), weights
    )
    rest = non_negative(np.array([[1.0, w.groups, w.rows] for w in work]), np.array([s.rest for s in steps]), weights)
    reward = sum(step.reward for step in steps) / max(sum(w.rollouts for w in work), 1)
    call, prompt, rollout = generation.tolist()
    step, group, row = rest.tolist()
    return Costs(call, prompt, rollout, reward, step, group, row)


def typical(steps: Sequence[Measured]) -> list[Measured]:
    """Return the steps without those that took several times as long as most, for another program's sake."""
    limit = _OUTLIER * float(np.median([step.seconds for step in steps]))
    return [step for step in steps if step.seconds <= limit]


def mean_seconds(steps: Sequence[Measured]) -> float:
    """Return the mean seconds of typical steps."""
    return float(np.mean([step.seconds for step in typical(steps)]))


def relative_error(steps: Sequence[Measured]) -> float:
    """Return the standard error of `mean_seconds`, as a share of it; 0 of a single step."""
    seconds = np.array([step.seconds for step in typical(steps)])
    return float(seconds.std(ddof=1) / seconds.mean() / np.sqrt(len(seconds))) if len(seconds) > 1 else 0.0


def non_negative(features_RF: Array, values_R: Array, weights_R: Array) -> Array:
    """Return the prices `[F]`, at least 0, with the least weighted squared error.

    Tries every set of features, which is exact and quick for a few of them; of equal errors the fewest features.

    >>> features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    >>> non_negative(features, np.array([3.0, 5.0, 9.0]), np.ones(3)).round(6).tolist()
    [1.0, 2.0]
    """
    features_RF, values_R = features_RF * weights_R[:, None], values_R * weights_R
    count = features_RF.shape[1]
    best, least = np.zeros(count), float(np.sum(values_R**2))
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            prices = np.linalg.lstsq(features_RF[:, chosen], values_R, rcond=None)[0]
            error = float(np.sum((features_RF[:, chosen] @ prices - values_R) ** 2))
            if (prices >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(count), error
                best[chosen] = prices
    return best
