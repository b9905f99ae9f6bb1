"""One generation: n rollouts a prompt, their rewards, and the m that are kept."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

# A float32 variance of larger rewards overflows within a group of 1024.
REWARD_LIMIT = 1e15


@dataclass
class Rollouts:
    """The rollouts of one generation, kept for the ledger and for metrics.

    Lists hold what this process generated, flat and prompt by prompt: of all P x N rollouts the `len(prompts)` from
    `first` on, which need not be whole groups. `rewards`, `kept` and `advantages` are those of all processes.
    """

    step: int
    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_tokens: list[int]
    reward_names: list[str]
    rewards_per_func: Tensor  # [len(prompts), F]
    first: int
    rewards: Tensor  # [P, N]
    kept: Tensor  # [P, M] int64
    advantages: Tensor | None = None  # [P, M], known once the batch is built

    def columns(self) -> dict[str, list[Any]]:
        """The ledger's columns, a value per rollout of this process (see `docs/architecture.md`)."""
        P, N = self.rewards.shape
        here = slice(self.first, self.first + len(self.prompts))
        assert self.advantages is not None
        advantages = torch.full((P, N), torch.nan).scatter_(1, self.kept, self.advantages.float())
        selected = torch.zeros(P, N, dtype=torch.bool).scatter_(1, self.kept, True)
        flat_advantages = advantages.flatten()[here].tolist()
        columns: dict[str, list[Any]] = {
            "step": [self.step] * len(self.prompts),
            "group": self._groups(),
            "rollout": [i % N for i in range(here.start, here.stop)],
            "prompt": [as_text(x) for x in self.prompts],
            "completion": [as_text(x) for x in self.completions],
            "answer": [str(row["answer"]) if "answer" in row else None for row in self.inputs],
            "reward": self.rewards.flatten()[here].tolist(),
        }
        for i, name in enumerate(self.reward_names):
            columns[f"reward/{name}"] = self.rewards_per_func[:, i].tolist()
        columns["selected"] = selected.flatten()[here].tolist()
        columns["advantage"] = [None if a != a else a for a in flat_advantages]
        columns["completion_tokens"] = list(self.completion_tokens)
        return columns

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps: each prompt once, and of its row in the data set the ledger's answer alone."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        answers = [{"answer": row["answer"]} if "answer" in row else {} for row in self.inputs]
        starts = [next(rollouts)[0] for _, rollouts in groupby(enumerate(self._groups()), key=lambda pair: pair[1])]
        return kept | {"inputs": [answers[i] for i in starts], "prompts": [self.prompts[i] for i in starts]}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Rollouts:
        """The record that `saved` was made from."""
        record = cls(**saved)
        groups = record._groups()
        record.inputs = [record.inputs[group - groups[0]] for group in groups]
        record.prompts = [record.prompts[group - groups[0]] for group in groups]
        return record

    def _groups(self) -> list[int]:
        """The prompt of each rollout of this process."""
        return [i // self.rewards.size(1) for i in range(self.first, self.first + len(self.completions))]


def apart(values: list[Any]) -> list[Any]:
    """Copy each value by itself: `copy.deepcopy` of the list would keep what two of them share."""
    return [copy.deepcopy(value) for value in values]


def as_text(value: Any) -> str:
    """A prompt or completion as text: chat messages become `role: content` blocks; one assistant turn its content."""
    if isinstance(value, str):
        return value
    if len(value) == 1 and value[0].get("role") == "assistant":
        return str(value[0].get("content") or "")
    return "\n\n".join(f"{m.get('role')}: {m.get('content')}" for m in value)


def refuse_unusable(rewards_per_func: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mark rollouts whose rewards cannot be trained on as unscored (NaN in every column).

    Infinite rewards, and rewards beyond 1e15 in size, with their weight or without, turn a group's variance, and with
    it the loss, into inf or NaN. An unscored rollout is never selected while scored ones remain; its advantage is 0.

    Args:
        rewards_per_func: `[rows, F]`; NaN means that one function had nothing to say, which is allowed.
        weights: `[F]`.

    Returns:
        The cleaned rewards, and for each function how many rollouts it spoiled, `[F]`.

    Example:
        >>> clean, spoiled = refuse_unusable(torch.tensor([[1.0, 0.0], [float("inf"), 1.0]]), torch.ones(2))
        >>> clean.tolist(), spoiled.tolist()
        ([[1.0, 0.0], [nan, nan]], [1, 0])
    """
    size = rewards_per_func.abs() * weights.to(rewards_per_func).abs().clamp(min=1.0)
    bad = size > REWARD_LIMIT  # false for NaN, true for both infinities
    return rewards_per_func.masked_fill(bad.any(dim=1, keepdim=True), torch.nan), bad.sum(dim=0)


def total_reward(rewards_per_func: Tensor, weights: Tensor, group: int, aggregation: str) -> Tensor:
    """One reward per rollout, `[P, group]`, as TRL adds several functions up; NaN where every function gave NaN.

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
