"""The record of one generation: n rollouts per prompt, their rewards, and the m kept ones, as files and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ....distributed.processes import gather
from ....selection import is_constant
from ....tables import columns_of, rows_of
from ....text import DEEPEST, TOO_DEEP, call_text, change_text, content_text, depth, utf8_text
from ...measuring import mark_unusable


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
        if any(map(_has_turns, self.completions)):
            columns["messages"] = [_messages_json(completion) for completion in self.completions]
        if any(rewards is not None for rewards in self.turn_rewards):
            columns["turn_rewards"] = [_numbers(rewards) for rewards in self.turn_rewards]
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
            "prompts": [_without_images(prompt) for prompt in self.prompts],
            "completions": [_written_completion(completion) for completion in self.completions],
            "turn_rewards": [_numbers(rewards) for rewards in self.turn_rewards],
        }


def gather_columns(record: Rollouts | None, write: Callable[[Any], str] | None = None) -> dict[str, list[Any]] | None:
    """Return the ledger's columns of all processes, ordered by group and rollout. Call it on every process.

    Args:
        record: of this process. If None, it has no generation yet.
        write: as of `Rollouts.columns`.
    """
    rows_here: list[dict[str, Any]] = []
    problem = ""
    try:
        if record is not None:
            rows_here = rows_of(record.columns(write))
    except Exception as error:  # each process must reach `gather`
        problem = f"{type(error).__name__}: {error}"
    rows: list[dict[str, Any]] = []
    for process_rows, process_problem in gather([(rows_here, problem)]):
        if process_problem:
            raise RuntimeError(process_problem)
        rows += process_rows
    rows.sort(key=lambda row: (row["group"], row["rollout"]))
    return columns_of(rows) or None  # the rows of one process alone may have turns


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


# -- prompts and completions as text -----------------------------------------------------------------------------------


def _answer(row: Mapping[str, Any]) -> str | None:
    """Return the answer of a row of the data as text; None if it has none."""
    return str(row["answer"]) if "answer" in row else None


def _each_once(prompts: Sequence[Any], write: Callable[[Any], str]) -> list[str]:
    """Return each prompt's text; equal ones that follow each other, as those of a group do, are written once."""
    texts: list[str] = []
    written: Any = None  # the prompt of the latest text
    for prompt in prompts:
        plain = _without_images(prompt)
        if not texts or plain != written:
            written = plain
            text = write(plain)
        texts.append(text)
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
    return "\n\n".join(f"{_speaker(message)}: {_message_text(message)}" for message in value)


def _speaker(message: Mapping[str, Any]) -> str:
    return " ".join(str(message[key]) for key in ("role", "name") if message.get(key))


def _message_text(message: Mapping[str, Any]) -> str:
    lines = [f"tool call: {call_text(call)}" for call in message.get("tool_calls") or ()]
    content = content_text(message.get("content"))
    if content or not lines:
        lines.insert(0, content)
    return "\n".join(lines)


def _has_turns(completion: Any) -> bool:
    """Return whether a completion is more than a text or one assistant message without tool calls."""
    if isinstance(completion, str):
        return False
    return len(completion) > 1 or any(message.get("tool_calls") for message in completion)


def _messages_json(completion: Any) -> str | None:
    """Return the messages of a completion that has turns; None for one that has none."""
    from ....runs import to_json

    if not _has_turns(completion):
        return None
    return to_json(_written_completion(completion))


def _written_completion(completion: Any) -> Any:
    if isinstance(completion, str):
        return completion
    return [_written(message) for message in completion]


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as files hold it: its texts, and its tool calls as they are unless they nest too deeply."""
    names = ("role", "name", "reasoning_content", "thinking", "content")
    kept: dict[str, Any] = {name: content_text(message[name]) for name in names if message.get(name) is not None}
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = [_written_call(call) for call in calls]
    return kept


def _written_call(call: Any) -> Any:
    if depth(call) <= DEEPEST:
        return call
    return {"function": {"name": call_text(call).partition("(")[0], "arguments": TOO_DEEP}}


def _without_images(prompt: Any) -> Any:
    """Return a prompt without the images of its messages, which a chat template does not read."""
    if isinstance(prompt, str):
        return prompt
    return [_message_without_images(message) for message in prompt]


def _message_without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part_without_images(part) for part in content]}


def _part_without_images(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {key: value if isinstance(value, str) else None for key, value in part.items()}


def _numbers(rewards: Any) -> list[float] | None:
    """Return one rollout's rewards by turn; NaN: not a number."""
    if rewards is None:
        return None
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(values, list | tuple):
        values = [values]
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


# -- TRL's table of completions ----------------------------------------------------------------------------------------


def saved_table(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's table of completions for a checkpoint, without images: after a resume its rows show none."""
    return {name: _saved_column(name, column) for name, column in logs.items()}


def _saved_column(name: str, column: Any) -> Any:
    if isinstance(column, Mapping):  # a column for each reward function
        return {part: list(values) for part, values in column.items()}
    if name == "images":
        return [None] * len(column)
    if name in ("prompt", "completion"):
        return [_without_images(entry) for entry in column]
    return list(column)


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


def make_table_storable(logs: Mapping[str, Any]) -> None:
    """Escape characters in TRL's table of completions, in place, that its Parquet file cannot hold."""
    for column in (logs["prompt"], logs["completion"], *logs["extra"].values()):
        storable = [change_text(entry, utf8_text) for entry in column]
        column.clear()
        column.extend(storable)
