"""The record of one generation: n rollouts per prompt, their rewards, and the m kept ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ...text import DEEPEST, TOO_DEEP, call_text, content_text, depth


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
    masked: Tensor | None = None  # [G, N] bool, truncated rollouts that the loss masks out; None: none of them

    def columns(self, write: Callable[[Any], str] | None = None) -> dict[str, list[Any]]:
        """Return the ledger's columns, a value per rollout of this process (see `docs/architecture.md`).

        Args:
            write: makes a prompt's text, once a prompt; None: `as_text`.
        """
        assert self.advantages is not None
        G, N = self.rewards.shape
        kept, here = self.kept_numbers(), torch.tensor(self.numbers)
        advantages = torch.full((G * N,), torch.nan).index_copy_(0, kept, self.advantages.float().flatten())
        selected = torch.zeros(G * N, dtype=torch.bool).index_fill_(0, kept, True)
        columns: dict[str, list[Any]] = {
            "step": [self.step] * len(self.prompts),
            "group": [i // N for i in self.numbers],
            "rollout": [i % N for i in self.numbers],
            "prompt": _each_once(self.prompts, write or as_text),
            "completion": [as_text(x) for x in self.completions],
            "answer": [str(row["answer"]) if "answer" in row else None for row in self.inputs],
            "reward": self.rewards.flatten()[here].tolist(),
        }
        for i, name in enumerate(self.reward_names):
            columns[f"reward/{name}"] = self.rewards_per_func[:, i].tolist()
        columns["selected"] = selected[here].tolist()
        columns["advantage"] = [None if a != a else a for a in advantages[here].tolist()]
        columns["completion_tokens"] = list(self.completion_tokens)
        if any(map(_has_turns, self.completions)):
            from ...runs import to_json

            columns["messages"] = [
                to_json([_written(m) for m in x]) if _has_turns(x) else None for x in self.completions
            ]
        if any(given is not None for given in self.turn_rewards):
            columns["turn_rewards"] = [_numbers(given) for given in self.turn_rewards]
        return columns

    def kept_numbers(self) -> Tensor:
        """Return the number of each kept rollout over all groups, int64 `[P * M]`."""
        return (self.groups.unsqueeze(1) * self.rewards.size(1) + self.kept).flatten()

    def scored_rewards(self) -> Tensor:
        """Return the total rewards that selection and advantages read, `[G, N]`: NaN also for rollouts masked out."""
        if self.masked is None:
            return self.rewards
        return self.rewards.masked_fill(self.masked, torch.nan)

    def kept_rewards(self) -> Tensor:
        """Return the total reward of each kept rollout, `[P, M]`; NaN if it is unscored or masked out."""
        return self.scored_rewards()[self.groups].gather(1, self.kept)

    def replace_groups(self, places: Tensor, more: Rollouts, groups: Tensor) -> None:
        """Add another generation's groups, and train some of them instead of some of this one's.

        Args:
            places: int64 `[D]`, which of the P groups are replaced.
            more: the other generation, with as many rollouts a prompt.
            groups: int64 `[D]`, the group of `more` for each place.
        """
        G, N = self.rewards.shape
        for name in ("inputs", "prompts", "completions", "completion_tokens"):
            getattr(self, name).extend(getattr(more, name))
        if self.turn_rewards or more.turn_rewards:
            own = self.turn_rewards or [None] * len(self.numbers)
            self.turn_rewards = own + (more.turn_rewards or [None] * len(more.numbers))
        self.numbers += [G * N + number for number in more.numbers]
        self.rewards_per_func = torch.cat([self.rewards_per_func, more.rewards_per_func])
        self.rewards = torch.cat([self.rewards, more.rewards])
        if self.masked is not None and more.masked is not None:
            self.masked = torch.cat([self.masked, more.masked])
        self.kept[places], self.groups[places] = more.kept[groups], G + more.groups[groups]
        if self.advantages is not None and more.advantages is not None:
            self.advantages[places] = more.advantages[groups]

    def saved(self) -> dict[str, Any]:
        """Return the record for a checkpoint, which `Rollouts(**saved)` restores: rows have their answer, no images."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {
            "inputs": [{"answer": row["answer"]} if "answer" in row else {} for row in self.inputs],
            "prompts": [_without_images(prompt) for prompt in self.prompts],
            "completions": [x if isinstance(x, str) else [_written(m) for m in x] for x in self.completions],
            "turn_rewards": [_numbers(given) for given in self.turn_rewards],
        }


def _each_once(prompts: Sequence[Any], write: Callable[[Any], str]) -> list[str]:
    """Return each prompt's text; equal ones that follow each other, as those of a group do, are written once."""
    texts: list[str] = []
    for i, prompt in enumerate(plain := [_without_images(prompt) for prompt in prompts]):
        texts.append(texts[-1] if i and prompt == plain[i - 1] else write(prompt))
    return texts


def as_text(value: Any) -> str:
    """Return a prompt or completion as text: messages become `role: content` blocks, one assistant turn its content.

    Tool calls are lines below the content, an image is `[image]`.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> print(as_text([{"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
    ...                {"role": "tool", "name": "add", "content": "3"}]))
    assistant: Let me see.
    tool call: add(a=1, b=2)
    <BLANKLINE>
    tool add: 3
    """
    if isinstance(value, str):
        return value
    if len(value) == 1 and value[0].get("role") == "assistant":
        return _message_text(value[0])
    return "\n\n".join(
        f"{' '.join(str(m[key]) for key in ('role', 'name') if m.get(key))}: {_message_text(m)}" for m in value
    )


def _message_text(message: Mapping[str, Any]) -> str:
    calls = [f"tool call: {call_text(call)}" for call in message.get("tool_calls") or ()]
    content = content_text(message.get("content"))
    return "\n".join([content, *calls] if content or not calls else calls)


def _has_turns(completion: Any) -> bool:
    """Return whether a completion is more than a text or one assistant message without tool calls."""
    return not isinstance(completion, str) and (len(completion) > 1 or any(m.get("tool_calls") for m in completion))


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as files hold it: its texts, and its tool calls as they are unless they nest too deeply."""
    names = ("role", "name", "reasoning_content", "thinking", "content")
    kept: dict[str, Any] = {name: content_text(message[name]) for name in names if message.get(name) is not None}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [
            call
            if depth(call) <= DEEPEST
            else {"function": {"name": call_text(call).partition("(")[0], "arguments": TOO_DEEP}}
            for call in calls
        ]
    return kept


def _without_images(prompt: Any) -> Any:
    """Return a prompt without the images of its messages, which a chat template does not read."""

    def without(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {key: value if isinstance(value, str) else None for key, value in part.items()}

    if isinstance(prompt, str):
        return prompt
    return [
        {**m, "content": [without(x) for x in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in prompt
    ]


def _numbers(given: Any) -> list[float] | None:
    """Return one rollout's rewards by turn; NaN: no number."""

    def number(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return float("nan")

    if given is None:
        return None
    values = given.tolist() if hasattr(given, "tolist") else given
    return [number(x) for x in values] if isinstance(values, list | tuple) else [number(values)]


def saved_table(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's table of completions for a checkpoint, without images: after a resume its rows show none."""

    def rows(name: str, column: Any) -> Any:
        if isinstance(column, Mapping):
            return {part: list(values) for part, values in column.items()}
        if name == "images":
            return [None] * len(column)
        return [_without_images(entry) for entry in column] if name in ("prompt", "completion") else list(column)

    return {name: rows(name, column) for name, column in logs.items()}
