"""Settings of n and m, the work of their steps, and what each part of that work costs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_TIMES = (1, 2, 4, 8)  # n as a multiple of m
_FEWEST_ROWS = 4  # of a prompt; with fewer, the advantages are noise


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


def settings_to_compare(recipe_setting: Setting, rows: int) -> list[Setting]:
    """Return the settings that train `rows` rows per step, plain GRPO at the recipe's m first.

    m is the recipe's, a half, a quarter and twice that; n is 1, 2, 4 and 8 times m. Fewer rows of a prompt mean more
    prompts in a step.

    >>> [setting.label for setting in settings_to_compare(Setting(32, 8), 8)]
    ['8 -> 8', '16 -> 8', '32 -> 8', '64 -> 8', '4 -> 4', '8 -> 4', '16 -> 4', '32 -> 4']
    """
    m = recipe_setting.m
    sizes = [m]
    for size in (m // 2, m // 4, 2 * m):
        if size >= _FEWEST_ROWS and rows % size == 0:
            sizes.append(size)
    settings = [Setting(size * times, size) for size in sizes for times in _TIMES]
    if recipe_setting not in settings:
        settings.append(recipe_setting)
    return settings


def to_measure(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings whose steps show the prices: few and many rollouts, few and many prompts.

    >>> [setting.label for setting in to_measure(settings_to_compare(Setting(32, 8), 8))]
    ['8 -> 8', '32 -> 8', '64 -> 8', '8 -> 4']
    """
    recipe_m = settings[0].m
    smallest_m = min(setting.m for setting in settings)
    few_prompts = _with_m(settings, recipe_m)
    many_prompts = _with_m(settings, smallest_m)
    measured = [few_prompts[0], few_prompts[len(few_prompts) // 2], few_prompts[-1]]
    measured.append(many_prompts[min(1, len(many_prompts) - 1)])
    return list(dict.fromkeys(measured))


def _with_m(settings: Sequence[Setting], m: int) -> list[Setting]:
    """Return the settings of one m, the fewest rollouts first."""
    with_m = [setting for setting in settings if setting.m == m]
    return sorted(with_m, key=lambda setting: setting.n)


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
    weights = []
    generation_work = []
    generation_seconds = []
    update_work = []
    update_seconds = []
    for steps in measured:
        median = float(np.median([step.seconds for step in steps]))
        for step in steps:
            weights.append(1 / median)
            generation_work.append([1.0, step.work.prompts, step.work.rollouts])
            generation_seconds.append(step.generation)
            update_work.append([1.0, step.work.rows])
            update_seconds.append(step.update)
    call, prompt, rollout = _non_negative(generation_work, generation_seconds, weights)
    update, row = _non_negative(update_work, update_seconds, weights)
    return Prices(call + update, prompt, rollout, row)


def _non_negative(
    features: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return weighted least-squares prices: as long as one is below 0, set the lowest to 0 and fit the others again."""
    weights_R = np.array(weights)
    features_RF = np.array(features) * weights_R[:, None]
    values_R = np.array(values) * weights_R
    prices_F = np.zeros(features_RF.shape[1])
    fitted = list(range(features_RF.shape[1]))
    while fitted:
        prices_F[:] = 0
        prices_F[fitted] = np.linalg.lstsq(features_RF[:, fitted], values_R, rcond=None)[0]
        if (prices_F >= 0).all():
            break
        fitted.remove(int(prices_F.argmin()))
    prices: list[float] = prices_F.tolist()
    return prices
