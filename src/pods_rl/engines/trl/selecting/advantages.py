"""From the scores of all n rollouts to the advantages of the m kept rows, and the metrics of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....selection import Selection, advantages, is_constant, spread
from ...measuring import mark_unusable
from ..compat import Batch, Metrics, TRLTrainer, add_up_counters, nanstd
from ..config import group_sizes
from .generation import Built, Selected
from .record import Rollouts, total_reward


def set_advantages(built: Built, trainer: TRLTrainer) -> None:
    """Put the advantages of this process's rows into TRL's batch, where TRL's own are not right.

    TRL's are right for the mean of the kept rows. They are not for other baselines, nor for a batch that dynamic
    sampling changed and that is scaled as one. Groups without a signal have advantages of exactly 0.
    """
    batch = built.batch
    selected = built.selected
    record = selected.record
    args = trainer.args
    m = record.kept.size(1)
    rows_here = slice(built.generation.rows.start, built.generation.rows.stop)
    is_plain = args.num_rollouts == args.num_generations
    over_all_rollouts = args.advantages == "before" and not is_plain
    joined_and_scaled_as_one = len(record.rewards) != len(record.groups) and trainer.scale_rewards == "batch"
    advantages_B = batch["advantages"].clone()
    # The named reward of dynamic sampling is equal for all of such a group; others may differ, and must not train it.
    without_signal_P = selected.unreplaced.clone()
    if over_all_rollouts or joined_and_scaled_as_one or args.advantage_baseline != "mean":
        settings: dict[str, Any] = {
            "when": args.advantages,
            "baseline": args.advantage_baseline,
            "scale": trainer.scale_rewards,
        }
        advantages_PM = advantages(_single_rewards(selected, trainer), Selection(record.kept), **settings)
        advantages_B = advantages_PM.flatten()[rows_here].to(advantages_B.device)  # [P, M] -> [P * M] -> [B]
        if over_all_rollouts:
            without_signal_P |= is_constant(record.scored_rewards()[record.groups], args.reward_tolerance)
        else:
            without_signal_P |= is_constant(record.kept_rewards(), args.reward_tolerance)
    elif not (is_plain and args.exact_trl) or args.reward_tolerance:
        # The mean of equal float32 rewards can differ from them by rounding: TRL's advantages are then not zero.
        without_signal_P |= has_constant_rows(selected, trainer)
    without_signal_B = without_signal_P.repeat_interleave(m)[rows_here]  # [P] -> [P * M] -> [B]
    advantages_B[without_signal_B.to(advantages_B.device)] = 0.0
    if not torch.equal(advantages_B, batch["advantages"]):
        batch["advantages"] = advantages_B


def _single_rewards(selected: Selected, trainer: TRLTrainer) -> Tensor:
    """Return the rewards of each prompt's n rollouts in float32, as TRL adds them up, `[P, N]`."""
    record = selected.record
    totals_GN = total_reward(
        selected.scores.cpu(),
        trainer.reward_weights,
        record.rewards.size(1),
        trainer.multi_objective_aggregation,
        dtype=torch.float32,
    )
    trained_GN = None if record.masked is None else ~record.masked
    return mark_unusable(totals_GN, trained_GN)[record.groups]


def has_constant_rows(selected: Selected, trainer: TRLTrainer) -> Tensor:
    """Return which prompts have kept rows of equal rewards, added up as TRL does for its advantages, bool `[P]`."""
    record = selected.record
    if trainer.multi_objective_aggregation == "sum_then_normalize":
        return is_constant(record.kept_rewards(), trainer.args.reward_tolerance)
    # Each function is normalised over the kept rows. Dynamic sampling never joins such batches.
    totals_PM = total_reward(
        selected.kept_scores.cpu(), trainer.reward_weights, record.kept.size(1), trainer.multi_objective_aggregation
    )
    return is_constant(totals_PM)


def gather_advantages(batch: Batch, trainer: TRLTrainer) -> Tensor:
    """Return the advantages of the rows of all processes, `[P, M]` on the CPU. Call this on every process."""
    _, m = group_sizes(trainer.args)
    return trainer.accelerator.gather(batch["advantages"]).view(-1, m).cpu()  # [B] -> [P * M] -> [P, M]


# -- metrics ---------------------------------------------------------------------------------------------------------


def log_generation(trainer: TRLTrainer, record: Rollouts, scores: Tensor, before: Mapping[str, int]) -> None:
    """Log the statistics of a generation, of its kept rows and of all its rollouts.

    Args:
        record: of the generation, complete.
        scores: `[G * n, F]` of the reward functions.
        before: the number of entries of each metric before the generation.
    """
    metrics = trainer._metrics["train"]
    _log_selection(metrics, record, trainer.args.reward_tolerance)
    add_up_counters(metrics, before)
    if record.kept.numel() != record.rewards.numel():
        _log_all_rollouts(trainer, scores, before)


def _log_selection(metrics: Metrics, record: Rollouts, tolerance: float) -> None:
    """Log the kept rollouts' rewards and the groups without spread, over all processes."""
    kept_PM = record.kept_rewards()
    metrics["pods/selected/reward_mean"].append(kept_PM.nanmean().item())
    metrics["pods/selected/reward_std"].append(spread(kept_PM).mean().item())
    metrics["pods/zero_variance_share"].append(is_constant(kept_PM, tolerance).float().mean().item())


def _log_all_rollouts(trainer: TRLTrainer, scores: Tensor, before: Mapping[str, int]) -> None:
    """Log reward statistics of all rollouts instead of those that TRL logged of the kept rows."""
    metrics = trainer._metrics["train"]
    n, _ = group_sizes(trainer.args)
    totals_GN = total_reward(scores.cpu(), trainer.reward_weights, n, "sum_then_normalize")
    statistics = {
        "reward": totals_GN.nanmean(),
        "reward_std": nanstd(totals_GN.flatten()),
        "frac_reward_zero_std": is_constant(totals_GN).float().mean(),
    }
    for i, name in enumerate(trainer.reward_func_names):
        statistics[f"rewards/{name}/mean"] = scores[:, i].nanmean()
        statistics[f"rewards/{name}/std"] = nanstd(scores[:, i])
    for name, value in statistics.items():
        metrics[name][before.get(name, 0) :] = [value.item()]
