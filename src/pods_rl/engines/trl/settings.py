"""Checks of PODSConfig's settings: losses, advantages, sampling, waves and dead groups. Does not import torch.

Names and meanings are TRL's, except for those of PODSConfig.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import UserError

ADVANTAGES = ("after", "before")
BASELINES = ("mean", "leave_one_out")
REWARD_ERRORS = ("raise", "zero", "drop")

_SEQUENCE_CORRECTIONS = ("sequence_mask", "sequence_truncate")


def check_losses(settings: Mapping[str, Any]) -> None:
    """Refuse loss settings that contradict each other or would train something else than they state.

    Args:
        settings: by TRL's names and ours; a missing one has TRL's default.

    Raises:
        UserError: an unknown choice or a combination that cannot work, with the reason and a fix.

    >>> check_losses({"advantage_baseline": "leave_one_out", "scale_rewards": "none"})
    >>> check_losses({"loss_type": "cispo"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    pods_rl.errors.UserError: loss_type = cispo caps each token's importance weight at epsilon_high...
    """
    refuse_impossible(settings)
    for doubt in loss_doubts(settings):
        raise UserError(doubt)


def loss_doubts(settings: Mapping[str, Any]) -> list[str]:
    """Return warnings about settings that TRL accepts: a recipe refuses them, PODSConfig warns.

    >>> loss_doubts({"loss_type": "cispo", "epsilon_high": 5.0})
    []
    """
    doubts = []
    cap = settings.get("epsilon_high")
    if settings.get("loss_type") == "cispo" and (cap is None or cap < 1):
        given = "is not set (TRL then takes epsilon)" if cap is None else f"= {cap:g}"
        doubts.append(
            f"loss_type = cispo caps each token's importance weight at epsilon_high, which {given}: a cap below 1 "
            "replaces nearly every weight by the cap. Set epsilon_high: 5.0, as in ScaleRL (arXiv 2510.13786)."
        )
    if settings.get("loss_type") == "vespo" and settings.get("importance_sampling_level") == "sequence":
        doubts.append(
            "loss_type = vespo weighs whole sequences by itself, so importance_sampling_level = sequence would change "
            "only its KL term: unset importance_sampling_level."
        )
    return doubts


def refuse_impossible(settings: Mapping[str, Any]) -> None:
    """Refuse settings that cannot work: unknown values of our keys, and contradictory combinations.

    Raises:
        UserError: what was given, and what to set.
    """
    mode = settings.get("vllm_importance_sampling_mode") or "sequence_mask"
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction", True)
    if settings.get("loss_type") == "vespo" and corrected and mode in _SEQUENCE_CORRECTIONS:
        raise UserError(
            "loss_type = vespo sums vLLM's correction over a sequence's tokens, so it needs one for each token; got "
            f"vllm_importance_sampling_mode = {mode}: set token_truncate or token_mask."
        )
    when = settings.get("advantages", "after")
    baseline = settings.get("advantage_baseline", "mean")
    errors = settings.get("reward_errors", "raise")
    if when not in ADVANTAGES:
        raise UserError(f"advantages: expected 'after' (the paper) or 'before', got {when!r}")
    if baseline not in BASELINES:
        raise UserError(f"advantage_baseline: expected 'mean' (GRPO) or 'leave_one_out' (RLOO), got {baseline!r}")
    if errors not in REWARD_ERRORS:
        raise UserError(f"reward_errors: expected 'raise', 'zero' or 'drop', got {errors!r}")
    aggregation = settings.get("multi_objective_aggregation", "sum_then_normalize")
    if (when == "before" or baseline == "leave_one_out") and aggregation != "sum_then_normalize":
        ours = "advantages='before'" if when == "before" else "advantage_baseline='leave_one_out'"
        raise UserError(
            f"{ours} takes one baseline for the summed reward, so it needs "
            f"multi_objective_aggregation='sum_then_normalize', got {aggregation!r}"
        )
    # TRL reads true as group and false as none.
    if baseline == "leave_one_out" and settings.get("scale_rewards", "group") in ("group", True, "True", "true"):
        raise UserError(
            "advantage_baseline = leave_one_out leaves each reward out of its own baseline, and scale_rewards = group "
            "would put it back by dividing by the deviation of all of them (m / (m - 1) times the mean's advantages). "
            "Set scale_rewards: none (RLOO's own), or batch."
        )


# What changes rounding, draws or which steps are skipped; `exact_trl` turns all of it off.
LEVERS = ("prompt_once", "skip_zero_advantage_steps")
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
