"""The record of one generation: n rollouts per prompt, their rewards, and the m kept ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ....selection import is_constant
from ...measuring import mark_unusable
from ..transcript import as_text, has_turns, messages_json, plain_completion, turn_numbers, without_images


@dataclass
class Rollouts:
    """The rollouts of one generation, kept for the ledger and for metrics.

    Lists hold the rollouts of this process, prompt by prompt, which need not be complete groups: rollout i of group g
    has number g N + i. `rewards`, `kept`, `groups` and `advantages` are those of all processes. The G groups are the P
    of the batch and, after them, those that dynamic sampling added.
    """

    step: int
    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_tokens: list[int]
    reward_names: list[str]
    rewards_per_func: Tensor  # [len(prompts), F]
    numbers: list[int]
    rewards: Tensor  # [G, N]; NaN: not scored
    kept: Tensor  # [P, M] int64, numbers in the group
    groups: Tensor  # [P] int64, the group of each prompt's kept rollouts
    advantages: Tensor | None = None  # [P, M], known once the batch is built
    turn_rewards: list[Any] = field(default_factory=list)  # of each rollout's assistant turns, or None; empty: none
    masked: Tensor | None = None  # [G, N] bool, rollouts without a token in the loss. If None, none of them

    def columns(self, write: Callable[[Any], str] | None = None) -> dict[str, list[Any]]:
        """Return the ledger's columns, a value per rollout of this process (see `docs/architecture.md`).

        Args:
            write: returns the text of a prompt; called once for each prompt. If None, `as_text`.
        """
        assert self.advantages is not None
        G, N = self.rewards.shape
        kept = self.kept_numbers()
        numbers = torch.tensor(self.numbers, dtype=torch.int64)  # also if this process has none
        advantages = torch.full((G * N,), torch.nan).index_copy_(0, kept, self.advantages.float().flatten())
        selected = torch.zeros(G * N, dtype=torch.bool).index_fill_(0, kept, True)
        columns: dict[str, list[Any]] = {
            "step": [self.step] * len(self.prompts),
            "group": (numbers // N).tolist(),
            "rollout": (numbers % N).tolist(),
            "prompt": _each_once(self.prompts, write or as_text),
            "completion": [as_text(completion) for completion in self.completions],
            "answer": [_answer(row) for row in self.inputs],
            "reward": self.rewards.flatten()[numbers].tolist(),
        }
        for i, name in enumerate(self.reward_names):
            columns[f"reward/{name}"] = self.rewards_per_func[:, i].tolist()
        columns["selected"] = selected[numbers].tolist()
        columns["advantage"] = [
            None if math.isnan(advantage) else advantage for advantage in advantages[numbers].tolist()
        ]
        columns["completion_tokens"] = list(self.completion_tokens)
        if any(map(has_turns, self.completions)):
            columns["messages"] = [messages_json(completion) for completion in self.completions]
        if any(rewards is not None for rewards in self.turn_rewards):
            columns["turn_rewards"] = [turn_numbers(rewards) for rewards in self.turn_rewards]
        return columns

    def kept_numbers(self) -> Tensor:
        """Return the number of each kept rollout over all groups, int64 `[P * M]`."""
        return (self.groups.unsqueeze(1) * self.rewards.size(1) + self.kept).flatten()

    def scored_rewards(self) -> Tensor:
        """Return the total rewards that selection and advantages read, `[G, N]`: NaN also for rollouts masked out."""
        return mark_unusable(self.rewards, None if self.masked is None else ~self.masked)

    def kept_rewards(self) -> Tensor:
        """Return the total reward of each kept rollout, `[P, M]`; NaN if it is unscored or masked out."""
        return self.scored_rewards()[self.groups].gather(1, self.kept)

    def replace_groups(self, replaced: Tensor, added: Rollouts, groups: Tensor) -> None:
        """Add another generation's groups, and train some of them instead of some of this one's.

        Args:
            replaced: int64 `[D]`, which of the P groups are no longer trained.
            added: the other generation, with as many rollouts a prompt.
            groups: int64 `[D]`, the group of `added` for each of these.
        """
        G, N = self.rewards.shape
        for name in ("inputs", "prompts", "completions", "completion_tokens"):
            getattr(self, name).extend(getattr(added, name))
        if self.turn_rewards or added.turn_rewards:
            rewards_before = self.turn_rewards or [None] * len(self.numbers)
            self.turn_rewards = rewards_before + (added.turn_rewards or [None] * len(added.numbers))
        self.numbers += [G * N + number for number in added.numbers]
        self.rewards_per_func = torch.cat([self.rewards_per_func, added.rewards_per_func])
        self.rewards = torch.cat([self.rewards, added.rewards])
        if self.masked is not None and added.masked is not None:
            self.masked = torch.cat([self.masked, added.masked])
        self.kept[replaced] = added.kept[groups]
        self.groups[replaced] = G + added.groups[groups]
        if self.advantages is not None and added.advantages is not None:
            self.advantages[replaced] = added.advantages[groups]

    def saved(self) -> dict[str, Any]:
        """Return the record for a checkpoint, which `Rollouts(**saved)` restores: rows have their answer, no images."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {
            "inputs": [{"answer": row["answer"]} if "answer" in row else {} for row in self.inputs],
            "prompts": [without_images(prompt) for prompt in self.prompts],
            "completions": [plain_completion(completion) for completion in self.completions],
            "turn_rewards": [turn_numbers(rewards) for rewards in self.turn_rewards],
        }


def total_reward(
    rewards_per_func: Tensor, weights: Tensor, group: int, aggregation: str, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return one reward per rollout, `[P, group]`, added up as TRL does; NaN if every function returned NaN.

    The sum is exact to float64 and then rounded, so that equal parts have one sum in whatever order they are.

    Args:
        rewards_per_func: `[P * group, F]`.
        weights: `[F]`.
        group: rollouts per prompt.
        aggregation: TRL's `multi_objective_aggregation`.
        dtype: of the sum. In float64 the order of equal parts hardly changes it; TRL adds in float32.
    """
    scores = rewards_per_func.to(dtype)
    unscored = scores.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        grouped = scores.view(-1, group, scores.size(1))  # [P * group, F] -> [P, group, F]
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)  # [P, 1, F]
        std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        # Divided by a deviation of 0, rounding would become a reward.
        constant = torch.stack([is_constant(column) for column in grouped.unbind(dim=2)], dim=1)  # [P, F]
        scores = (centred / (std + 1e-4)).masked_fill(constant.unsqueeze(1), 0.0).view_as(scores)
    total = (scores * weights.to(scores)).nansum(dim=1)  # [P * group]
    return total.masked_fill(unscored, torch.nan).view(-1, group)


def _answer(row: Mapping[str, Any]) -> str | None:
    """Return the answer of a row of the data as text; None if it has none."""
    return str(row["answer"]) if "answer" in row else None


def _each_once(prompts: Sequence[Any], write: Callable[[Any], str]) -> list[str]:
    """Return each prompt's text; equal ones that follow each other, as those of a group do, are written once."""
    texts: list[str] = []
    written: Any = None  # the prompt of the latest text
    for prompt in prompts:
        plain = without_images(prompt)
        if not texts or plain != written:
            written = plain
            text = write(plain)
        texts.append(text)
    return texts


# -- TRL's table of completions ----------------------------------------------------------------------------------------


def show_scores(logged: Mapping[str, Any], record: Rollouts, scores: Tensor) -> None:
    """Put the scores of rows that are masked out into TRL's table of completions, which has NaN for them.

    Args:
        logged: by reward function, the column of the table; its last rows are those of this generation.
        record: of the generation.
        scores: of all its rollouts, `[P * n, F]`.
    """
    if record.masked is None:
        return
    kept_scores = scores[record.kept_numbers()]  # [P * n, F] -> [P * m, F]
    for i, name in enumerate(record.reward_names):
        _replace_last(logged[name], kept_scores[:, i].tolist())


def show_advantages(logged: Any, record: Rollouts) -> None:
    """Put the advantages of the batch into TRL's table of completions, which has those that TRL computed."""
    assert record.advantages is not None
    if len(record.rewards) != len(record.groups):  # dynamic sampling: the table has rows that were replaced
        return
    _replace_last(logged, record.advantages.flatten().tolist())


def _replace_last(column: Any, values: list[float]) -> None:
    """Replace the last entries of a column of TRL's table, a deque that may hold fewer than these."""
    for _ in range(min(len(column), len(values))):
        column.pop()
    column.extend(values)
