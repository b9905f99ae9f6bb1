"""The record of one generation: n rollouts per prompt, their rewards, and the m kept ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ....selection import is_constant
from ...measuring import mark_unusable
from ..transcript import as_text, has_turns, plain_completion, without_images


@dataclass
class Rollouts:
    """The rollouts of one generation, kept for the ledger and for metrics.

    Lists hold the rollouts of this process, prompt by prompt; those of a prompt may be on two processes. Rollout i of
    prompt p has number p N + i. `rewards`, `kept` and `advantages` are those of all processes. The P prompts are those
    of TRL's batch and, after them, those that dynamic sampling added. Q of them are trained.
    """

    step: int
    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_tokens: list[int]
    reward_names: list[str]
    rewards_per_func: Tensor  # [len(prompts), F]
    numbers: list[int]
    rewards: Tensor  # [P, N]; NaN: not scored
    kept: Tensor  # int64, the number of each kept rollout, in the order of the rows; fewer than R leave rows empty
    advantages: Tensor | None = None  # of each kept rollout, known once the batch is built
    masked: Tensor | None = None  # [P, N] bool, rollouts without a token in the loss. If None, none of them
    is_ragged: bool = False  # whether prompts may keep different numbers

    @classmethod
    def joined(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Return the record of several rounds of a generation, of which nothing is kept yet."""
        lists: dict[str, Any] = {}
        for name in ("inputs", "prompts", "completions", "completion_tokens", "numbers"):
            lists[name] = [value for part in parts for value in getattr(part, name)]
        masks = [part.masked for part in parts if part.masked is not None]
        return replace(
            parts[0],
            **lists,
            rewards_per_func=torch.cat([part.rewards_per_func for part in parts]),
            rewards=torch.cat([part.rewards for part in parts]),
            masked=torch.cat(masks) if masks else None,
        )

    def columns(self, write: Callable[[Any], str] | None = None) -> dict[str, list[Any]]:
        """Return the ledger's columns, a value per rollout of this process (see `docs/architecture.md`).

        Args:
            write: returns the text of a prompt; called once for each prompt. If None, `as_text`.
        """
        assert self.advantages is not None
        P, N = self.rewards.shape
        numbers = torch.tensor(self.numbers, dtype=torch.int64)  # also if this process has none
        advantages = torch.full((P * N,), torch.nan).index_copy_(0, self.kept, self.advantages.float())
        selected = torch.zeros(P * N, dtype=torch.bool).index_fill_(0, self.kept, True)
        write = write or as_text
        prompt_texts: list[str] = []
        written: Any = None  # the prompt of the latest text
        for prompt in self.prompts:
            plain = without_images(prompt)
            if not prompt_texts or plain != written:  # the prompts of a group follow each other, and are equal
                written = plain
                text = write(plain)
            prompt_texts.append(text)
        columns: dict[str, list[Any]] = {
            "step": [self.step] * len(self.prompts),
            "group": (numbers // N).tolist(),
            "rollout": (numbers % N).tolist(),
            "prompt": prompt_texts,
            "completion": [as_text(completion) for completion in self.completions],
            "answer": [str(row["answer"]) if "answer" in row else None for row in self.inputs],
            "reward": self.rewards.flatten()[numbers].tolist(),
        }
        for i, name in enumerate(self.reward_names):
            columns[f"reward/{name}"] = self.rewards_per_func[:, i].tolist()
        columns["selected"] = selected[numbers].tolist()
        if self.is_ragged:
            columns["prompt_rows"] = self.sizes()[numbers // N].tolist()
        columns["advantage"] = [
            None if math.isnan(advantage) else advantage for advantage in advantages[numbers].tolist()
        ]
        columns["completion_tokens"] = list(self.completion_tokens)
        if any(map(has_turns, self.completions)):
            from ....runs import to_json  # a script that only trains does not need the package

            columns["messages"] = [
                to_json(plain_completion(completion)) if has_turns(completion) else None
                for completion in self.completions
            ]
        return columns

    def sizes(self) -> Tensor:
        """Return how many rollouts of each prompt are kept, int64 `[P]`."""
        P, N = self.rewards.shape
        return (self.kept // N).bincount(minlength=P)

    def scored_rewards(self) -> Tensor:
        """Return the total rewards that selection and advantages read, `[P, N]`: NaN also for rollouts masked out."""
        return mark_unusable(self.rewards, None if self.masked is None else ~self.masked)

    def kept_rewards(self) -> Tensor:
        """Return the total rewards of the prompts that are trained, `[Q, N]`; NaN if not kept, unscored or masked out.

        With the same number of rows of each, `[Q, M]` in the order of the rows.
        """
        return self.by_group(self.scored_rewards().flatten()[self.kept])

    def by_group(self, values_R: Tensor) -> Tensor:
        """Return a value of each kept rollout by the prompts that are trained, NaN where one has fewer."""
        if not self.is_ragged:
            _, sizes = (self.kept // self.rewards.size(1)).unique_consecutive(return_counts=True)
            return values_R.view(len(sizes), -1)
        values_PN = torch.full(self.rewards.shape, torch.nan, dtype=values_R.dtype)
        values_PN.view(-1)[self.kept] = values_R
        return values_PN[self.sizes() > 0]

    def saved(self) -> dict[str, Any]:
        """Return the record for a checkpoint, which `Rollouts(**saved)` restores: rows have their answer, no images."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {
            "inputs": [{"answer": row["answer"]} if "answer" in row else {} for row in self.inputs],
            "prompts": [without_images(prompt) for prompt in self.prompts],
            "completions": [plain_completion(completion) for completion in self.completions],
        }


def total_reward(
    rewards_per_func: Tensor, weights: Tensor, size: int, aggregation: str, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return one reward per rollout, `[P, size]`, added up as TRL does; NaN if every function returned NaN.

    The sum is exact to float64 and then rounded, so that equal parts have one sum in whatever order they are. TRL adds
    in float32. `aggregation` is its `multi_objective_aggregation`.
    """
    scores = rewards_per_func.to(dtype)
    unscored = scores.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        grouped = scores.view(-1, size, scores.size(1))  # [P * size, F] -> [P, size, F]
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)  # [P, 1, F]
        std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        # Divided by a deviation of 0, rounding would become a reward.
        constant = torch.stack([is_constant(column) for column in grouped.unbind(dim=2)], dim=1)  # [P, F]
        scores = (centred / (std + 1e-4)).masked_fill(constant.unsqueeze(1), 0.0).view_as(scores)
    total = (scores * weights.to(scores)).nansum(dim=1)  # [P * size]
    return total.masked_fill(unscored, torch.nan).view(-1, size)


def replace_last(column: Any, values: list[float]) -> None:
    """Replace the last entries of a column of TRL's table of completions, a deque that may hold fewer than these."""
    for _ in range(min(len(column), len(values))):
        column.pop()
    column.extend(values)
