"""Families of arms that differ in one setting: n, m, the rule, or when advantages are normalised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import OWN_TO_A_RUN, Arm, rollouts_of
from .curves import finite
from .text import plain

AXES = {
    "n": "rollouts generated (n)",
    "m": "rollouts kept (m)",
    "rule": "selection rule",
    "advantages": "advantages",
}
_AXIS_KEYS = {"num_rollouts", "num_generations", "rule", "advantages"}
# rows follow m, so an ablation of m keeps the prompts of a step: they are compared instead (_prompts)
_ROW_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
# these decide how memory and disk are used, not what is learned
_NO_MATTER = {"rollout_batch_size", "vllm_gpu_memory_utilization", "eval_batch_size", "ledger_every", "report_to"}


@dataclass(frozen=True)
class AblationSetting:
    """What an arm trains with, as far as it decides what is learned."""

    n: int
    m: int
    rule: str
    advantages: str
    rest: frozenset[tuple[str, str]]

    @property
    def is_plain(self) -> bool:
        """Plain GRPO: it keeps all it generates, so rule and advantages change nothing."""
        return self.n == self.m

    def differences(self, other: AblationSetting) -> set[str]:
        """Return the axes in which two arms differ, and ``rest`` for anything else."""
        free = {"rule", "advantages"} if self.is_plain or other.is_plain else set()
        return {key for key in (*AXES, "rest") if key not in free and getattr(self, key) != getattr(other, key)}

    def value(self, axis: str) -> str:
        return plain(getattr(self, axis), limit=30) + (" (GRPO)" if self.is_plain else "")


def setting_of(config: Mapping[str, Any]) -> AblationSetting | None:
    """Return the setting of a resolved recipe, or of the columns of a CSV. If n or m is unknown, return None.

    >>> setting_of({"num_generations": 16, "rule": "random", "seed": 3})
    AblationSetting(n=16, m=16, rule='random', advantages='', rest=frozenset())
    """
    n, m = rollouts_of(config)
    if not n or not m:
        return None
    skipped = OWN_TO_A_RUN | _AXIS_KEYS | _NO_MATTER | {*_ROW_KEYS}
    rest = {key: value for key, value in config.items() if key not in skipped and value is not None}
    shown = frozenset((str(key), in_order(value)) for key, value in (rest | _prompts(config, m)).items())
    return AblationSetting(n, m, str(config.get("rule") or ""), str(config.get("advantages") or ""), shown)


def in_order(value: Any) -> str:
    """Return a setting as JSON with sorted keys; a value that JSON cannot hold as Python writes it."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _prompts(config: Mapping[str, Any], m: int) -> dict[str, float]:
    """Return the batch in prompts, which an ablation of m keeps, rather than in rows, which it does not."""
    rows, micro, steps, generated = (finite(config.get(key)) for key in _ROW_KEYS)
    micro = micro or 1.0
    shares = {
        "prompts per step": rows and rows * micro / m,
        "updates per generation": steps and steps / micro,
        "prompts per generation": generated and generated / m,
    }
    return {key: share for key, share in shares.items() if share is not None}


@dataclass(frozen=True, eq=False)
class Ablation:
    """Arms that differ from the reference in one setting, and the value each has; in order of the values."""

    axis: str
    reference: Arm
    arms: tuple[Arm, ...]
    values: tuple[str, ...]


def find_ablations(arms: Sequence[Arm]) -> tuple[Ablation, ...]:
    """Return the families through one reference arm: the one from which most others differ in a single setting.

    Of several such arms one that drops rollouts comes first, then the order given. A family needs two arms, and
    three if it is all there is: the rest of the report compares two arms already.
    """
    known = [(arm, setting) for arm in arms if (setting := setting_of(arm.config))]
    if not known:
        return ()

    def neighbours(own: AblationSetting) -> dict[str, list[tuple[Arm, AblationSetting]]]:
        """Return the arms that differ in exactly one setting, by that setting."""
        return {axis: [pair for pair in known if own.differences(pair[1]) == {axis}] for axis in AXES}

    def rank(pair: tuple[Arm, AblationSetting]) -> tuple[int, bool]:
        return sum(map(len, neighbours(pair[1]).values())), not pair[1].is_plain

    reference, own = max(known, key=rank)
    found = []
    for axis, others in neighbours(own).items():
        if others and (len(others) > 1 or len(arms) > 2):
            family = [(reference, own), *others]
            if axis in ("n", "m"):
                family.sort(key=lambda pair: getattr(pair[1], axis))
            values = tuple(setting.value(axis) for _, setting in family)
            found.append(Ablation(axis, reference, tuple(arm for arm, _ in family), values))
    return tuple(found)
