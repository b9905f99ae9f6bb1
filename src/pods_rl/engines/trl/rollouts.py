"""The record of one generation: n rollouts per prompt, their rewards, and the m kept ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...text import plain_text


@dataclass
class Rollouts:
    """The rollouts of one generation, kept for the ledger and for metrics.

    Lists hold the rollouts of this process, flat and prompt by prompt: of all P x N rollouts the `len(prompts)` from
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
        """Return the ledger's columns, a value per rollout of this process (see `docs/architecture.md`)."""
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
        """Return the record for a checkpoint: each prompt once, and of its row in the data set only the answer."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        answers = [{"answer": row["answer"]} if "answer" in row else {} for row in self.inputs]
        starts = [next(rollouts)[0] for _, rollouts in groupby(enumerate(self._groups()), key=lambda pair: pair[1])]
        return kept | {"inputs": [answers[i] for i in starts], "prompts": [self.prompts[i] for i in starts]}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Rollouts:
        """Return the record that `saved` was made from."""
        record = cls(**saved)
        groups = record._groups()
        record.inputs = [record.inputs[group - groups[0]] for group in groups]
        record.prompts = [record.prompts[group - groups[0]] for group in groups]
        return record

    def _groups(self) -> list[int]:
        """Return the prompt of each rollout of this process."""
        return [i // self.rewards.size(1) for i in range(self.first, self.first + len(self.completions))]


def as_text(value: Any) -> str:
    """Return a prompt or completion as text: messages become `role: content` blocks, one assistant turn its content."""
    if isinstance(value, str):
        return value
    if len(value) == 1 and value[0].get("role") == "assistant":
        return str(value[0].get("content") or "")
    return "\n\n".join(f"{m.get('role')}: {m.get('content')}" for m in value)


def escape_table(logs: Mapping[str, Any]) -> None:
    """Escape TRL's table of completions in place, which it prints to the terminal."""
    for rows in (logs["prompt"], logs["completion"], *logs["extra"].values()):
        escaped = [escape(entry) for entry in rows]
        rows.clear()
        rows.extend(escaped)


def escape(entry: Any) -> Any:
    """Return a text, or a chat's messages, with terminal control characters escaped.

    >>> escape([{"role": "user", "content": "\\x1b[2J"}])
    [{'role': 'user', 'content': '\\\\x1b[2J'}]
    """
    if isinstance(entry, str):
        return plain_text(entry)
    if isinstance(entry, Mapping):
        return {key: escape(value) for key, value in entry.items()}
    return [escape(part) for part in entry] if isinstance(entry, list) else entry
