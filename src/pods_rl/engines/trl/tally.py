"""The metrics of one generation: rewards of all rollouts and of those kept, waves, and calls of TRL counted as one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...rollouts.allocating import live
from ...rollouts.stopping import Status
from ...selection import is_constant, spread
from .compat import TRLTrainer, nanstd
from .generated import Generated
from .keeping import KeptRows
from .rows import gather_shares
from .waves import RoundPlan

# Logged once for each call of `_calculate_rewards`: numbers of rollouts, which add up.
_CALLED, _FAILED = "tools/call_frequency", "tools/failure_frequency"  # TRL's
_COUNTS = ("pods/unusable_rewards", "pods/unscored_rollouts", "pods/reward_errors", "pods/reward_timeouts")


class OneEntry:
    """Make several calls of TRL's `_generate` and `_calculate_rewards` look like one in the metrics.

    TRL logs the lengths of each call's completions and counts its tokens. After several waves each metric has one
    entry instead, over all rollouts; rollouts that were generated for equal parts alone, and dropped, count nowhere.

    Args:
        trainer: before the first call.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self._entries = {name: len(values) for name, values in trainer._metrics["train"].items()}
        self._tokens = trainer.state.num_input_tokens_seen

    def settle(self, found: Generated) -> None:
        """Replace the entries since the beginning. Collective if there was more than one call."""
        trainer, metrics = self._trainer, self._trainer._metrics["train"]
        if trainer.tools:
            self._count_calls(found.asked)
        if len(found.asked) == 1 and not found.repeated:
            return
        ends = torch.tensor([*trainer.eos_token_ids, trainer._tokenizer.pad_token_id])
        last = torch.tensor([ids[-1] for ids in found.completion_ids])
        columns = [[len(ids) for ids in found.prompt_ids], found.tokens]
        local = torch.cat([torch.tensor(columns), ~torch.isin(last, ends).unsqueeze(0)]).T
        prompts, lengths, cut = gather_shares(local.contiguous().to(trainer.accelerator.device), found.counts).cpu().T
        for name, value in completion_statistics(lengths.float(), cut.bool()).items():
            self._replace(metrics[f"completions/{name}"], f"completions/{name}", value)
        for name in _COUNTS:
            self._replace(metrics[name], name, sum(metrics[name][self._entries.get(name, 0) :]))
        for name, values in trainer._pending_metrics.items():
            if name.startswith("pods/verifier_"):  # TRL averages what functions log: these are numbers of rollouts too
                values[:] = [sum(values)]
        trainer.state.num_input_tokens_seen = self._tokens + int(prompts.sum() + lengths.sum())
        metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]

    def _count_calls(self, rows: list[int]) -> None:
        """Log calls of tools and failures, with those of rollouts that were dropped; TRL logs shares of each wave."""
        metrics = self._trainer._metrics["train"]
        called, failed = (metrics[name][self._entries.get(name, 0) :] for name in (_CALLED, _FAILED))
        calls = [share * count for share, count in zip(called, rows, strict=True)]
        failures = sum(share * count for share, count in zip(failed, calls, strict=True))
        metrics["pods/tool_calls"].append(float(round(sum(calls))))
        metrics["pods/tool_failures"].append(float(round(failures)))
        if len(rows) > 1:
            self._replace(metrics[_CALLED], _CALLED, sum(calls) / sum(rows))
            self._replace(metrics[_FAILED], _FAILED, failures / sum(calls) if sum(calls) else 0.0)

    def _replace(self, values: list[float], name: str, value: float) -> None:
        values[self._entries.get(name, 0) :] = [value]


def completion_statistics(lengths_R: Tensor, cut_R: Tensor) -> dict[str, float]:
    """Return what TRL logs of completions: of all, and of those that ended by themselves (0 if none did).

    Args:
        lengths_R: tokens of each.
        cut_R: whether it reached the limit of tokens.

    >>> completion_statistics(torch.tensor([2.0, 4.0]), torch.tensor([False, True]))["mean_terminated_length"]
    2.0
    """
    ended_R = lengths_R[~cut_R] if not cut_R.all() else torch.zeros(1)
    found = {"clipped_ratio": cut_R.float().mean().item()}
    for kind, values in (("length", lengths_R), ("terminated_length", ended_R)):
        found |= {f"mean_{kind}": values.mean().item()}
        found |= {f"min_{kind}": values.min().item(), f"max_{kind}": values.max().item()}
    return found


def log_waves(metrics: dict[str, list[float]], plan: RoundPlan, found: Generated, slots_P: Tensor) -> None:
    """Log what waves and refilling did, over all processes, where they are on.

    `pods/waves/rollouts` is the mean number of rollouts generated for a prompt, `pods/waves/decided` and
    `pods/waves/gave_up` are shares of the prompts, `pods/waves/count` counts the calls of the generator.
    `pods/refill/prompts_drawn` counts further prompts, `pods/refill/live_share` is the share of the batch's places
    whose prompts have rewards that differ.
    """
    if plan.stopping is not None:
        prompts = len(found.status)
        metrics["pods/waves/rollouts"].append(sum(found.generated) / prompts)
        metrics["pods/waves/decided"].append(found.status.count(Status.DECIDED) / prompts)
        metrics["pods/waves/gave_up"].append(found.status.count(Status.GAVE_UP) / prompts)
        metrics["pods/waves/count"].append(float(len(found.asked)))
    if plan.refill is not None:
        metrics["pods/refill/prompts_drawn"].append(float(len(found.inputs) - len(slots_P)))
        metrics["pods/refill/live_share"].append(live(plan.answers(found.scores_GNF[slots_P])).float().mean().item())


def total_reward(rewards_per_func: Tensor, weights: Tensor, group: int, aggregation: str) -> Tensor:
    """Return one reward per rollout, `[P, group]`, added up as TRL does; NaN if every function returned NaN.

    Args:
        rewards_per_func: `[P * group, F]`.
        weights: `[F]`.
        group: rollouts per prompt.
        aggregation: TRL's `multi_objective_aggregation`.
    """
    unscored = rewards_per_func.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        grouped = rewards_per_func.view(-1, group, rewards_per_func.size(1))
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)
        std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        rewards_per_func = (centred / (std + 1e-4)).view_as(rewards_per_func)
    total = (rewards_per_func * weights.to(rewards_per_func)).nansum(dim=1)
    return total.masked_fill(unscored, torch.nan).view(-1, group)


def log_selection(metrics: dict[str, list[float]], rewards_GN: Tensor, rows: KeptRows) -> None:
    """Log the kept rollouts' rewards and the groups without spread, over all processes."""
    kept = rows.by_slot(rewards_GN)
    constant = is_constant(kept)
    metrics["pods/selected/reward_mean"].append(kept.nanmean().item())
    metrics["pods/selected/reward_std"].append(spread(kept).mean().item())
    metrics["pods/zero_variance_groups"].append(float(constant.sum()))
    metrics["pods/zero_variance_share"].append(constant.float().mean().item())


def log_all_rollouts(
    metrics: dict[str, list[float]], rewards_per_func: Tensor, rewards_GN: Tensor, names: list[str]
) -> None:
    """Replace the reward statistics that TRL just logged over the kept rows by those over all rollouts."""
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"][-1] = rewards_per_func[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"][-1] = nanstd(rewards_per_func[:, i]).item()
    metrics["reward"][-1] = rewards_GN.nanmean().item()
    metrics["reward_std"][-1] = nanstd(rewards_GN.flatten()).item()
    metrics["frac_reward_zero_std"][-1] = is_constant(rewards_GN).float().mean().item()
