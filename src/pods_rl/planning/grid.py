"""The settings that `pods plan` compares: n, m, waves, giving up and places of dead groups. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..engines.trl.batching import BatchPlan
from ..engines.trl.settings import check_rollouts
from ..errors import UserError

# Keys of a recipe that a plan sets; rows a step, learning rate and all others stay the recipe's.
PLANNED = (
    "num_generations", "num_rollouts", "rollout_waves", "stop_variance", "give_up_after", "give_up_probability",
    "dead_groups",
)  # fmt: skip
AUTO = "auto"  # a recipe's num_rollouts: plan before training
_TIMES = (1, 2, 4, 8)  # n as a multiple of m
_FEWEST = 4  # rows of a prompt; with fewer, advantages of two values are noise


@dataclass(frozen=True)
class Setting:
    """One way to make a generation batch: n, m, sizes of waves, when a group is given up, places of dead groups.

    >>> Setting(64, 16, (16, 48), 16, "refill").label
    '64 -> 16, waves 16+48, give up, refill'
    """

    num_rollouts: int
    num_generations: int
    rollout_waves: tuple[int, ...] | None = None
    give_up_after: int | None = None
    dead_groups: str = "keep"

    @property
    def keys(self) -> dict[str, Any]:
        """Return the recipe keys, `PLANNED` in this order."""
        waves = None if self.rollout_waves is None else list(self.rollout_waves)
        values = (
            self.num_generations, self.num_rollouts, waves, 1.0, self.give_up_after, 1.0, self.dead_groups,
        )  # fmt: skip
        return dict(zip(PLANNED, values, strict=True))

    @property
    def label(self) -> str:
        waves = self.rollout_waves and "waves " + "+".join(map(str, self.rollout_waves))
        parts = [waves, self.give_up_after and "give up", self.dead_groups != "keep" and self.dead_groups]
        return ", ".join([f"{self.num_rollouts} -> {self.num_generations}", *(part for part in parts if part)])

    @property
    def parts(self) -> int:
        """Number of features that the setting turns on; between equally good settings, a plan picks the simplest."""
        more = self.num_rollouts > self.num_generations
        return more + sum(map(bool, (self.rollout_waves, self.give_up_after, self.dead_groups != "keep")))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Setting:
        """Return the setting of a recipe; without `num_rollouts`, or with auto, n = m."""
        waves, n = values.get("rollout_waves"), values.get("num_rollouts")
        m = values["num_generations"]
        return cls(
            n if isinstance(n, int) else m, m, tuple(waves) if waves else None, values.get("give_up_after"),
            values.get("dead_groups", "keep"),
        )  # fmt: skip


def plain_grpo(values: Mapping[str, Any]) -> Setting:
    """Return GRPO at a recipe's m: all generated rollouts are trained."""
    return Setting(values["num_generations"], values["num_generations"])


def settings_to_compare(
    values: Mapping[str, Any], plan: BatchPlan, fits: Callable[[Setting], bool] = lambda setting: True
) -> list[Setting]:
    """Return the settings that a recipe allows, plain GRPO at its m first.

    The rows of a generation batch stay; so with fewer rows of a prompt there are more prompts.

    Args:
        values: the recipe's.
        plan: its batches.
        fits: whether a setting fits into memory; the recipe's own GRPO is always offered.

    >>> plan = BatchPlan(8, 8, 1, 8, 1, 1, None)
    >>> found = settings_to_compare({"num_generations": 8}, plan)
    >>> len(found), [setting.label for setting in found[:3]]
    (69, ['8 -> 8', '8 -> 8, refill', '16 -> 8'])
    """
    rows, own = plan.rows_per_generation, values["num_generations"]
    base = plain_grpo(values)
    found = [base]
    for setting in (*_grid(rows, own), Setting.of(values)):
        if setting not in found and fits(setting):
            try:
                check_rollouts({**values, **setting.keys})
            except UserError:
                continue
            found.append(setting)
    return found


def _grid(rows: int, own: int) -> Iterator[Setting]:
    sizes = [own, *(m for m in (own // 2, own // 4, 2 * own) if m >= _FEWEST and rows % m == 0)]
    for m in sizes:
        places = ("keep", "refill") if m == rows else ("keep", "share", "refill")
        for n in (m * times for times in _TIMES):
            waves: list[tuple[tuple[int, ...] | None, int | None]] = [(None, None)]
            if n > m:
                waves += [(sizes, after) for sizes in dict.fromkeys(((m, m), (m, n - m))) for after in (None, m)]
            for sizes_of_waves, after in waves:
                if after == n:
                    continue
                for dead in places:
                    if n > m or dead != "share":  # nothing is generated beyond a group's own places
                        yield Setting(n, m, sizes_of_waves, after, dead)
