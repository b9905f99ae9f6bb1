"""Checks of PODSConfig's settings that contradict each other or TRL's. Does not import torch.

Names and meanings are TRL's, except for those of PODSConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UserError

ADVANTAGES = ("after", "before")
BASELINES = ("mean", "leave_one_out")
REWARD_ERRORS = ("raise", "zero", "drop")
CLOCKS = ("wall", "cpu")
LEVERS = ("prompt_once", "skip_zero_advantage_steps")  # `exact_trl` turns them off

_CHOICES = {"advantages": ADVANTAGES, "advantage_baseline": BASELINES, "reward_errors": REWARD_ERRORS, "clock": CLOCKS}
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
    for key, known in _CHOICES.items():
        given = settings.get(key, known[0])
        if given not in known:
            raise UserError(f"{key} = {given!r}: expected {', '.join(known[:-1])} or {known[-1]}.")
    when, baseline = settings.get("advantages", "after"), settings.get("advantage_baseline", "mean")
    aggregation = settings.get("multi_objective_aggregation", "sum_then_normalize")
    used = {
        "advantages = before": when == "before",
        "advantage_baseline = leave_one_out": baseline == "leave_one_out",
        "dynamic_sampling": bool(settings.get("dynamic_sampling")),
    }
    for name in [name for name, on in used.items() if on and aggregation != "sum_then_normalize"]:
        raise UserError(
            f"{name} works on the summed reward: got multi_objective_aggregation = {aggregation}. Set "
            "multi_objective_aggregation: sum_then_normalize."
        )
    rounds = settings.get("dynamic_sampling_rounds", 3)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise UserError(
            f"dynamic_sampling_rounds = {rounds!r}: expected a whole number of at least 1. To draw no further prompts, "
            "set dynamic_sampling: false."
        )
    # TRL reads true as group and false as none.
    if baseline == "leave_one_out" and settings.get("scale_rewards", "group") in ("group", True, "True", "true"):
        raise UserError(
            "advantage_baseline = leave_one_out leaves each reward out of its own baseline, and scale_rewards = group "
            "would put it back by dividing by the deviation of all of them (m / (m - 1) times the mean's advantages). "
            "Set scale_rewards: none (RLOO's own), or batch."
        )
