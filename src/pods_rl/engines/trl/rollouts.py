"""The record of one generation: n rollouts per prompt, their rewards, and the m kept ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...text import plain_text


@dataclass
class Rollouts:
    """The rollouts of one generation, kept for the ledger and for metrics.

    Lists hold the rollouts of this process, prompt by prompt, which need not be whole groups: rollout i of group g has
    number g N + i. `rewards`, `kept`, `groups` and `advantages` are those of all processes. G groups are the P of the
    batch, and behind them those drawn in the place of dead ones.
    """

    step: int
    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_tokens: list[int]
    reward_names: list[str]
    rewards_per_func: Tensor  # [len(prompts), F]
    numbers: list[int]
    rewards: Tensor  # [G, N]; NaN: not scored, or not generated
    kept: Tensor  # [P, M] int64, numbers in the group
    groups: Tensor  # [P, M] int64, the group of each kept rollout
    advantages: Tensor | None = None  # [P, M], known once the batch is built
    wave_ends: list[int] = field(default_factory=list)  # with waves, rollouts of a group after each
    stopped: list[str] = field(default_factory=list)  # with waves, what stopped each group: decided, gave up or full

    def columns(self, write: Callable[[Any], str] | None = None) -> dict[str, list[Any]]:
        """Return the ledger's columns, a value per rollout of this process (see `docs/architecture.md`).

        Args:
            write: makes a prompt's text, once a prompt; None: `as_text`.
        """
        assert self.advantages is not None
        G, N = self.rewards.shape
        kept, here = (self.groups * N + self.kept).flatten(), torch.tensor(self.numbers)
        advantages = torch.full((G * N,), torch.nan).index_copy_(0, kept, self.advantages.float().flatten())
        selected = torch.zeros(G * N, dtype=torch.bool).index_fill_(0, kept, True)
        own = self._groups()
        texts = {
            group: (write or as_text)(prompt) for group, prompt in dict(zip(own, self.prompts, strict=True)).items()
        }
        columns: dict[str, list[Any]] = {
            "step": [self.step] * len(self.prompts),
            "group": own,
            "rollout": [i % N for i in self.numbers],
            "prompt": [texts[group] for group in own],
            "completion": [as_text(x) for x in self.completions],
            "answer": [str(row["answer"]) if "answer" in row else None for row in self.inputs],
            "reward": self.rewards.flatten()[here].tolist(),
        }
        for i, name in enumerate(self.reward_names):
            columns[f"reward/{name}"] = self.rewards_per_func[:, i].tolist()
        columns["selected"] = selected[here].tolist()
        columns["advantage"] = [None if a != a else a for a in advantages[here].tolist()]
        columns["completion_tokens"] = list(self.completion_tokens)
        if self.wave_ends:
            columns["wave"] = [bisect_right(self.wave_ends, i % N) + 1 for i in self.numbers]
            columns["stopped"] = [self.stopped[group] for group in own]
        return columns

    def saved(self) -> dict[str, Any]:
        """Return the record for a checkpoint: each prompt once, and of its row in the data set only the answer."""
        kept = {part.name: getattr(self, part.name) for part in fields(self)}
        answers = [{"answer": row["answer"]} if "answer" in row else {} for row in self.inputs]
        starts = [next(rollouts)[0] for _, rollouts in groupby(enumerate(self._groups()), key=lambda pair: pair[1])]
        return kept | {"inputs": [answers[i] for i in starts], "prompts": [self.prompts[i] for i in starts]}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Rollouts:
        """Return the record that `saved` was made from."""
        record = cls(**saved)
        groups = record._groups()
        place = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        record.inputs = [record.inputs[place[group]] for group in groups]
        record.prompts = [record.prompts[place[group]] for group in groups]
        return record

    def _groups(self) -> list[int]:
        """Return the prompt of each rollout of this process."""
        return [i // self.rewards.size(1) for i in self.numbers]


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
