"""From the scores of all n rollouts to the advantages of the kept rows, and the metrics of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....selection import BatchSelection, Selection, advantages, is_constant, spread
from ...measuring import mark_unusable
from ..compat import COUNTERS, Batch, TRLTrainer, nanstd
from ..config import group_sizes
from .generation import Generation
from .record import Rollouts, total_reward


def set_advantages(batch: Batch, generation: Generation, trainer: TRLTrainer) -> None:
    """Put the advantages of this process's rows into TRL's batch, where TRL's own are not right.

    TRL's are right if they are over the same number of kept rows of each prompt. Groups without a signal have
    advantages of exactly 0.
    """
    record = generation.record
    args = trainer.args
    rows_here = slice(generation.rows_here.start, generation.rows_here.stop)
    over_all_rollouts = args.advantages == "before" and not args.keeps_all
    advantages_B = batch["advantages"].clone()
    groups_R = record.kept // record.rewards.size(1)
    without_signal_G = torch.zeros(len(record.rewards), dtype=torch.bool)
    if over_all_rollouts or record.is_ragged:
        G, N = record.rewards.shape
        settings: dict[str, Any] = {"when": args.advantages, "scale": trainer.scale_rewards}
        # In float32, as TRL adds rewards up.
        totals_GN = total_reward(
            generation.scores.cpu(), trainer.reward_weights, N, trainer.multi_objective_aggregation, dtype=torch.float32
        )
        rewards_GN = mark_unusable(totals_GN, None if record.masked is None else ~record.masked)
        if record.is_ragged:
            kept_advantages = advantages(rewards_GN, BatchSelection(record.kept, G, N), **settings)
        else:
            groups_P = (record.kept // N).unique_consecutive()
            kept_PM = (record.kept % N).view(len(groups_P), -1)
            kept_advantages = advantages(rewards_GN[groups_P], Selection(kept_PM), **settings).flatten()
        rows_R = batch["advantages"].new_zeros(generation.rows)
        rows_R[: len(record.kept)] = kept_advantages.to(rows_R)
        advantages_B = rows_R[rows_here]
        if over_all_rollouts:
            without_signal_G = is_constant(record.scored_rewards(), args.reward_tolerance)
        else:
            without_signal_G[_constant_groups(record, record.kept_rewards(), args.reward_tolerance)] = True
    elif not (args.keeps_all and args.exact_trl) or args.reward_tolerance:
        # The mean of equal float32 rewards can differ from them by rounding: TRL's advantages are then not zero.
        rewards_QN = record.kept_rewards()
        if trainer.multi_objective_aggregation != "sum_then_normalize":
            # Each function is normalised over the kept rows. Dynamic sampling never joins such batches.
            assert generation.kept_scores is not None
            kept_scores = generation.kept_scores.cpu()
            _, m = group_sizes(args)
            rewards_QN = total_reward(kept_scores, trainer.reward_weights, m, trainer.multi_objective_aggregation)
        without_signal_G[_constant_groups(record, rewards_QN, args.reward_tolerance)] = True
    without_signal_R = torch.ones(generation.rows, dtype=torch.bool)  # an empty row has none
    without_signal_R[: len(record.kept)] = without_signal_G[groups_R]
    advantages_B[without_signal_R[rows_here].to(advantages_B.device)] = 0.0
    if not torch.equal(advantages_B, batch["advantages"]):
        batch["advantages"] = advantages_B


def _constant_groups(record: Rollouts, rewards_QN: Tensor, tolerance: float) -> Tensor:
    """Return which groups that are trained have kept rows of equal rewards, given as by `record.by_group`."""
    groups_R = record.kept // record.rewards.size(1)
    groups_Q = groups_R.unique() if record.is_ragged else groups_R.unique_consecutive()
    return groups_Q[is_constant(rewards_QN, tolerance)]


# -- metrics ---------------------------------------------------------------------------------------------------------


def log_generation(trainer: TRLTrainer, generation: Generation, before: Mapping[str, int]) -> None:
    """Log the statistics of a generation, of its kept rows and of all its rollouts; `before` counts earlier entries."""
    record = generation.record
    metrics = trainer._metrics["train"]
    kept_QN = record.kept_rewards()
    if len(kept_QN):
        is_constant_Q = is_constant(kept_QN, trainer.args.reward_tolerance)
        metrics["pods/selected/reward_mean"].append(kept_QN.nanmean().item())
        metrics["pods/selected/reward_std"].append(spread(kept_QN).mean().item())
        metrics["pods/zero_variance_share"].append(is_constant_Q.float().mean().item())
    if record.is_ragged:
        metrics["pods/prompts_trained"].append(float(len(kept_QN)))
        metrics["pods/rows_a_prompt"].append(len(record.kept) / max(1, len(kept_QN)))
    # Several generations of one step may have counted, and TRL logs the mean of the entries: here it is their sum.
    for name in COUNTERS:
        start = before.get(name, 0)
        if len(metrics.get(name, ())) > start + 1:
            metrics[name][start:] = [sum(metrics[name][start:])]
    if record.kept.numel() == record.rewards.numel():
        return
    # Reward statistics of all rollouts instead of those that TRL logged of the kept rows.
    scores = generation.scores
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
