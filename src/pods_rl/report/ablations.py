"""Ablations: arms that differ from one reference in a single setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .arms import Arm, rollouts_of
from .pooling import NO_MATTER, OWN_TO_A_RUN, in_order
from .text import finite, plain

AXES = {
    "n": "rollouts generated (n)",
    "m": "rollouts kept (m)",
    "rule": "selection rule",
    "advantages": "advantages",
}
"""What an ablation varies."""

_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Ablation:
    """Arms that differ from the reference in one setting, with the value of each, in order of the values."""

    axis: str
    reference: Arm
    arms: tuple[Arm, ...]
    values: tuple[str, ...]


def find_ablations(arms: Sequence[Arm]) -> tuple[Ablation, ...]:
    """Return the ablations around one reference arm: the one from which most others differ in a single setting.

    Of several such arms, the reference is one that drops rollouts if there is one, and the first of those. Two arms
    alone are not an ablation, since the rest of the report compares them already.
    """
    settings: dict[Arm, Settings] = {}
    for arm in arms:
        arm_settings = settings_of(arm.config)
        if arm_settings:
            settings[arm] = arm_settings
    if not settings or len(arms) == 2:
        return ()

    reference = max(settings, key=partial(_rank, settings))
    ablations = []
    for axis in AXES:
        members = [reference, *_family(settings, reference, axis)]
        if len(members) == 1:
            continue
        if axis in ("n", "m"):
            members.sort(key=lambda arm: settings[arm][axis])
        values = [_axis_value(settings[arm], axis) for arm in members]
        ablations.append(Ablation(axis, reference, tuple(members), tuple(values)))
    return tuple(ablations)


def _family(settings: Mapping[Arm, Settings], reference: Arm, axis: str) -> list[Arm]:
    """Return the arms that differ from the reference in exactly this setting."""
    family = []
    for arm in settings:
        if differences(settings[reference], settings[arm]) == {axis}:
            family.append(arm)
    return family


def _rank(settings: Mapping[Arm, Settings], arm: Arm) -> tuple[int, bool]:
    """Return how well an arm serves as the reference: by the number of arms around it, then if it drops rollouts."""
    size = 0
    for axis in AXES:
        size += len(_family(settings, arm, axis))
    return size, not is_plain(settings[arm])


def _axis_value(settings: Settings, axis: str) -> str:
    """Return the value of a varied setting, for a row or a figure."""
    value = plain(settings[axis], limit=30)
    if is_plain(settings):
        value += " (GRPO)"
    return value


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what an arm learns; empty if n or m is unknown.

    Args:
        config: a resolved recipe, or the columns of a CSV.

    >>> settings_of({"num_generations": 16, "rule": "random", "seed": 3})
    {'n': 16, 'm': 16, 'rule': 'random', 'advantages': ''}
    """
    n, m = rollouts_of(config)
    if not n or not m:
        return {}
    skipped = OWN_TO_A_RUN | NO_MATTER | {"num_rollouts", "num_generations", *AXES, *_ROWS}
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key not in skipped and value is not None:
            settings[str(key)] = in_order(value)
    rows = finite(config.get("per_device_train_batch_size"))
    micro_batches = finite(config.get("gradient_accumulation_steps")) or 1
    if rows:
        # rows follow m, so an ablation of m keeps the prompts of a step
        settings["prompts"] = rows * micro_batches / m
    settings["n"] = n
    settings["m"] = m
    settings["rule"] = str(config.get("rule") or "")
    settings["advantages"] = str(config.get("advantages") or "")
    return settings


def is_plain(settings: Settings) -> bool:
    """Whether an arm is plain GRPO: it keeps all it generates, so rule and advantages change nothing."""
    return bool(settings["n"] == settings["m"])


def differences(ours: Settings, theirs: Settings) -> set[str]:
    """Return the settings in which two arms differ."""
    keys = {*ours, *theirs}
    if is_plain(ours) or is_plain(theirs):
        keys -= {"rule", "advantages"}
    return {key for key in keys if ours.get(key) != theirs.get(key)}
