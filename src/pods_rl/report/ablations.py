"""Families of arms that differ in one setting: n, m, the rule, or when advantages are normalised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .arms import OWN_TO_A_RUN, Arm, rollouts_of
from .curves import finite
from .text import plain

Axis = Literal["n", "m", "rule", "advantages"]
AXES: dict[Axis, str] = {
    "n": "rollouts generated (n)",
    "m": "rollouts kept (m)",
    "rule": "selection rule",
    "advantages": "advantages",
}

_AXIS_KEYS = {"num_rollouts", "num_generations", "rule", "advantages"}
# rows follow m, so that an ablation of m keeps the prompts of a step: compared as such (_batch)
_ROW_KEYS = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
}
# these decide where and how fast memory is used, or what is kept on disk, not what is learned
_NO_MATTER = {"rollout_batch_size", "vllm_gpu_memory_utilization", "eval_batch_size", "ledger_every", "report_to"}


@dataclass(frozen=True)
class Setting:
    """What decides an arm, for comparing it with another."""

    n: int
    m: int
    rule: str
    advantages: str
    rest: frozenset[tuple[str, str]]

    @property
    def is_plain(self) -> bool:
        """Plain GRPO: it keeps all it generates, so that rule and advantages mean nothing."""
        return self.n == self.m

    def differences(self, other: Setting) -> set[str]:
        """The axes in which two arms differ, and ``rest`` for anything else."""
        free = {"rule", "advantages"} if self.is_plain or other.is_plain else set()
        return {key for key in (*AXES, "rest") if key not in free and getattr(self, key) != getattr(other, key)}


@dataclass(frozen=True, eq=False)
class Ablation:
    """Arms that differ from the reference in one setting, and the value each has; in order of the values."""

    axis: Axis
    reference: Arm
    arms: tuple[Arm, ...]
    values: tuple[str, ...]
    held: str  # what all of them share, in words

    @property
    def title(self) -> str:
        return AXES[self.axis]

    def label(self, value: str) -> str:
        """A value as a legend names it: ``n = 64``, ``random``, ``advantages before``."""
        return (
            f"{self.axis} = {value}"
            if self.axis in ("n", "m")
            else value
            if self.axis == "rule"
            else f"{self.axis} {value}"
        )


def setting_of(config: Mapping[str, Any]) -> Setting | None:
    """The setting of a resolved recipe, or of the columns of a CSV; None where n or m is unknown.

    >>> setting_of({"num_generations": 16, "rule": "random", "seed": 3})
    Setting(n=16, m=16, rule='random', advantages='', rest=frozenset())
    """
    n, m = rollouts_of(config)
    if not n or not m:
        return None
    own = OWN_TO_A_RUN | _AXIS_KEYS | _ROW_KEYS | _NO_MATTER
    rest = {key: value for key, value in config.items() if key not in own and value is not None} | _batch(config, m)
    shown = frozenset((str(key), in_order(value)) for key, value in rest.items())
    return Setting(n, m, str(config.get("rule") or ""), str(config.get("advantages") or ""), shown)


def in_order(value: Any) -> str:
    """A setting as JSON, mappings in the order of their keys; of a damaged file as Python writes it."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _batch(config: Mapping[str, Any], m: int) -> dict[str, float]:
    """The batch in prompts, which an ablation of m keeps, rather than in rows, which it does not."""
    rows, micro, steps, generated = (
        finite(config.get(key))
        for key in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "generation_batch_size",
        )
    )
    micro = micro or 1.0
    shares = {
        "prompts per step": rows and rows * micro / m,
        "updates per generation": steps and steps / micro,
        "prompts per generation": generated and generated / m,
    }
    return {key: share for key, share in shares.items() if share is not None}


def find_ablations(arms: Sequence[Arm]) -> tuple[Ablation, ...]:
    """The families through one reference arm: the arm from which most others differ in a single setting.

    Of several such arms one that drops rollouts comes first, then the order given. A family needs two arms, and
    three where it is all there is: two arms are compared by the rest of the report already.
    """
    known = [(arm, setting) for arm in arms if (setting := setting_of(arm.config))]
    if not known:
        return ()
    neighbours = {
        arm.name: [other for other, theirs in known if _is_step(setting.differences(theirs))] for arm, setting in known
    }
    reference, own = max(known, key=lambda pair: (len(neighbours[pair[0].name]), not pair[1].is_plain))
    settings = {arm.name: setting for arm, setting in known}
    found = []
    for axis in AXES:
        others = [arm for arm in neighbours[reference.name] if own.differences(settings[arm.name]) == {axis}]
        if others and (len(others) > 1 or len(arms) > 2):
            found.append(_family(axis, reference, others, settings))
    return tuple(found)


def _is_step(differences: set[str]) -> bool:
    return len(differences) == 1 and "rest" not in differences


def _family(axis: Axis, reference: Arm, others: Sequence[Arm], settings: Mapping[str, Setting]) -> Ablation:
    arms = [reference, *others]
    if axis in ("n", "m"):
        arms.sort(key=lambda arm: getattr(settings[arm.name], axis))
    return Ablation(
        axis,
        reference,
        tuple(arms),
        tuple(_value(settings[arm.name], axis) for arm in arms),
        _held(settings[reference.name], axis),
    )


def _value(setting: Setting, axis: Axis) -> str:
    value = plain(getattr(setting, axis), limit=30)
    return f"{value} (GRPO)" if setting.is_plain else value


def _held(setting: Setting, axis: Axis) -> str:
    """``n = 64, rule max_variance, advantages after``: the other settings of the reference."""
    parts = [f"{key} = {getattr(setting, key)}" for key in ("n", "m") if key != axis]
    if axis != "rule" and setting.rule:
        parts.append(f"rule {plain(setting.rule, limit=30)}")
    if axis != "advantages" and setting.advantages:
        parts.append(f"advantages {plain(setting.advantages, limit=30)}")
    return ", ".join(parts)
