"""Settings of cheaper rollouts and updates: the levers, and checks of waves and of dead groups' places. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import UserError

# What changes rounding, draws or which steps are skipped; `exact_trl` turns all of it off.
LEVERS = (
    "prompt_once_generation",
    "prompt_once_update",
    "skip_zero_advantage_rows",
    "merge_equal_rows",
    "trim_padding",
    "sort_by_length",
    "skip_zero_advantage_steps",
)
DEAD_GROUPS = ("keep", "share", "refill")
ROWS_PER_GROUP = ("fixed", "auto")
CLOCKS = ("wall", "cpu")

_FOR_WAVES = {"stop_variance": 1.0, "give_up_after": None, "give_up_probability": 1.0}  # their defaults


def check_rollouts(settings: Mapping[str, Any]) -> None:
    """Refuse settings of waves and dead groups that cannot work; a missing one has its default.

    Waves decide by the total reward's variance, so they need the rule that keeps the greatest, and advantages of the
    kept rows: those of all n rollouts would depend on how many were generated. Other numbers of rows than m need the
    same.

    Raises:
        UserError: what was given, and what to set.

    >>> check_rollouts({"rollout_waves": [16, 8], "give_up_after": 16})
    >>> check_rollouts({"give_up_after": 16})
    Traceback (most recent call last):
    pods_rl.errors.UserError: give_up_after = 16 needs rollout_waves: ...
    """
    for key, known in (("dead_groups", DEAD_GROUPS), ("rows_per_group", ROWS_PER_GROUP), ("clock", CLOCKS)):
        given = settings.get(key, known[0])
        if given not in known:
            raise UserError(f"{key} = {given!r}: expected {', '.join(known[:-1])} or {known[-1]}.")
    for key, default in _FOR_WAVES.items():
        if settings.get("rollout_waves") is None and settings.get(key, default) != default:
            raise UserError(
                f"{key} = {settings[key]} needs rollout_waves: all rollouts are generated at once, so no group can "
                f"stop. Set rollout_waves, for example [{settings.get('num_generations') or 16}, 8]."
            )
    n, after = settings.get("num_rollouts") or settings.get("num_generations"), settings.get("give_up_after")
    if isinstance(n, int) and after is not None and after >= n:
        raise UserError(
            f"give_up_after = {after} must be less than num_rollouts = {n}: no group could stop before its end. Lower "
            "give_up_after, or set it to null."
        )
    _check_range(settings.get("reward_range"))
    limit, majority = settings.get("refill_limit", 3), settings.get("majority_rows", 1.0)
    if limit < 1 or not majority > 0:
        raise UserError(
            f"refill_limit must be at least 1 and majority_rows above 0: got {limit} and {majority}. To refill "
            "nothing, set dead_groups: keep."
        )
    for key in _rule_bound(settings):
        _check_rule(key, settings)
    if settings.get("dead_groups") == "share" and settings.get("rows_per_group") == "auto":
        raise UserError(
            "dead_groups = share gives groups more rows than m and rows_per_group = auto gives them fewer: set one of "
            "them."
        )


def _rule_bound(settings: Mapping[str, Any]) -> list[str]:
    """The settings in use, as text, that need max_variance and advantages of the kept rows."""
    used = {
        f"rollout_waves = {settings.get('rollout_waves')}": settings.get("rollout_waves") is not None,
        "dead_groups = share": settings.get("dead_groups") == "share",
        "rows_per_group = auto": settings.get("rows_per_group") == "auto",
        "prefer_distinct = true": bool(settings.get("prefer_distinct")),
    }
    return [name for name, on in used.items() if on]


def _check_rule(used: str, settings: Mapping[str, Any]) -> None:
    needed = {"rule": "max_variance", "multi_objective_aggregation": "sum_then_normalize"}
    if not used.startswith("prefer_distinct"):
        needed["advantages"] = "after"
    for key, value in needed.items():
        given = settings.get(key, value)
        if given != value:
            raise UserError(
                f"{used} needs {key} = {value}: got {given}. Set {key}: {value}, or unset {used.split()[0]}."
            )


def _check_range(given: Any) -> None:
    if given is None:
        return
    numbers = isinstance(given, (list, tuple)) and all(
        isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in given
    )
    if not numbers or len(given) != 2 or not given[0] < given[1]:
        raise UserError(
            f"reward_range = {given}: expected the least and the greatest total reward, two finite numbers, as in "
            "[0.0, 1.0]."
        )
