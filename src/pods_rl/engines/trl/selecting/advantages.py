"""From the scores of all n rollouts to the advantages of the kept rows, and the metrics of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....selection import BatchSelection, Selection, advantages, is_constant, spread
from ...measuring import mark_unusable
from ..compat import COUNTERS, Batch, TRLTrainer, nanstd
from ..config import group_sizes
from .generation import Generation
from .record import total_reward


def set_advantages(batch: Batch, generation: Generation, trainer: TRLTrainer) -> None:
    """Put the advantages of this process's rows into TRL's batch: TRL's where they are right, or ours.

    TRL's are right if they are over the same number of kept rows of each prompt. Prompts without a signal have
    advantages of exactly 0.
    """
    record = generation.record
    args = trainer.args
    if args.keeps_all and args.exact_trl and not args.reward_tolerance:
        return  # TRL's to the last bit, with the rounding of its means
    P, N = record.rewards.shape
    # Q, the prompts that are trained, in the order of their rows; for each row its prompt among these.
    trained_Q, prompt_of_row = (record.kept // N).unique_consecutive(return_inverse=True)
    over_all_rollouts = args.advantages == "before" and not args.keeps_all
    rows_here = slice(generation.rows_here.start, generation.rows_here.stop)
    trl_advantages_hold = not over_all_rollouts and not record.is_ragged
    if trl_advantages_hold:
        advantages_B = batch["advantages"].clone()
    else:
        settings: dict[str, Any] = {"when": args.advantages, "scale": trainer.scale_rewards}
        # In float32, as TRL adds rewards up.
        totals_PN = total_reward(
            generation.scores.cpu(), trainer.reward_weights, N, trainer.multi_objective_aggregation, dtype=torch.float32
        )
        rewards_PN = mark_unusable(totals_PN, None if record.masked is None else ~record.masked)
        if record.is_ragged:
            kept_advantages = advantages(rewards_PN, BatchSelection(record.kept, P, N), **settings)
        else:
            kept_QM = (record.kept % N).view(len(trained_Q), -1)
            kept_advantages = advantages(rewards_PN[trained_Q], Selection(kept_QM), **settings).flatten()
        advantages_R = batch["advantages"].new_zeros(generation.rows)  # an empty row has 0
        advantages_R[: len(record.kept)] = kept_advantages.to(advantages_R)
        advantages_B = advantages_R[rows_here]
    if over_all_rollouts:
        rewards_QN = record.scored_rewards()[trained_Q]
    elif trainer.multi_objective_aggregation == "sum_then_normalize":
        rewards_QN = record.kept_rewards()
    else:
        # Each function is normalised over the kept rows. Dynamic sampling never joins such batches.
        assert generation.kept_scores is not None
        kept_scores = generation.kept_scores.cpu()
        _, m = group_sizes(args)
        rewards_QN = total_reward(kept_scores, trainer.reward_weights, m, trainer.multi_objective_aggregation)
    is_constant_Q = is_constant(rewards_QN, args.reward_tolerance)
    without_signal_R = torch.ones(generation.rows, dtype=torch.bool)  # also of rows that are empty
    without_signal_R[: len(record.kept)] = is_constant_Q[prompt_of_row]
    # The mean of equal float32 rewards can differ from them by rounding, so their advantages need not be 0.
    advantages_B[without_signal_R[rows_here].to(advantages_B.device)] = 0.0
    batch["advantages"] = advantages_B


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
    totals_PN = total_reward(scores.cpu(), trainer.reward_weights, n, "sum_then_normalize")
    statistics = {
        "reward": totals_PN.nanmean(),
        "reward_std": nanstd(totals_PN.flatten()),
        "frac_reward_zero_std": is_constant(totals_PN).float().mean(),
    }
    for i, name in enumerate(trainer.reward_func_names):
        statistics[f"rewards/{name}/mean"] = scores[:, i].nanmean()
        statistics[f"rewards/{name}/std"] = nanstd(scores[:, i])
    for name, value in statistics.items():
        metrics[name][before.get(name, 0) :] = [value.item()]
