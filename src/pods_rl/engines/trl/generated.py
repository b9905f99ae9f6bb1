"""What was generated so far in one generation: tokens and texts of this process's rollouts, rewards of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...rollouts.stopping import Status
from .compat import Batch
from .waves import Place, Wave

_IMAGES = ("images", "image")


@dataclass(frozen=True)
class Conversation:
    """What a rollout has beyond the completion of a data set's text: kept rows carry it to TRL's batch.

    Args:
        asked: the prompt with its images and what the environment said first.
        prompt: the same as TRL's tool loop left it, with all turns but the last.
        prompt_ids: tokens of the prompt.
        tool_mask: 1 for tokens of the policy, 0 for those of tools and environments; None: all are the policy's.
        fields: what a rollout function returned about it.
        images: of the prompt and of tools, None without.
        tool_images: of tools alone.
        turn_rewards: of its environment or its rollout function, None without.
    """

    asked: Any
    prompt: Any
    prompt_ids: list[int]
    tool_mask: list[int] | None
    fields: dict[str, Any]
    images: list[Any] | None
    tool_images: list[Any]
    turn_rewards: Any = None


def conversations(
    rows: Sequence[Batch], asked: Sequence[Any], prompts: Sequence[Any], output: tuple[Any, ...]
) -> list[Conversation]:
    """Return what TRL's `_generate` returned about each row beyond its completion.

    Args:
        rows: of the data set.
        asked: the argument of `_generate`.
        prompts: the same after it ran.
        output: its result.
    """
    prompt_ids, _, tool_mask, _, _, fields, images, tool_images = output
    found = []
    for i, row in enumerate(rows):
        mine = {name: values[i] if isinstance(values, list) else values for name, values in fields.items()}
        shown = images[i] if images is not None else _images(row)
        mask = None if tool_mask is None else tool_mask[i]
        turns = tool_images[i] if tool_images else []
        rewards = mine.get("turn_rewards")
        found.append(Conversation(asked[i], prompts[i], prompt_ids[i], mask, mine, shown, turns, rewards))
    return found


def with_turn_rewards(found: list[Conversation], environments: Sequence[Any] | None) -> list[Conversation]:
    """Add the attribute `turn_rewards` of the rows' environments, where they have one."""
    # copies: the environment's next rollout may change its own
    own = [deepcopy(getattr(environment, "turn_rewards", None)) for environment in environments or ()]
    if not any(rewards is not None for rewards in own):
        return found
    return [replace(each, turn_rewards=rewards) for each, rewards in zip(found, own, strict=True)]


def turn_rewards(found: Sequence[Conversation]) -> list[Any]:
    """Return the rewards by turn of each rollout; empty if none has any."""
    own = [each.turn_rewards for each in found]
    return own if any(rewards is not None for rewards in own) else []


def _images(row: Mapping[str, Any]) -> list[Any] | None:
    """Return a row's images, which TRL takes from the data set where a rollout function returned none."""
    if "images" in row:
        return row["images"]
    return None if row.get("image") is None else [row["image"]]


def batch_row(row: Batch, kept: Conversation) -> Batch:
    """Return the row that TRL builds its batch from: the prompt has the images already."""
    return {name: value for name, value in row.items() if name not in _IMAGES} | {"prompt": kept.prompt}


class Generated:
    """The rollouts of one generation so far: of this process their tokens and texts, of all processes their rewards.

    Groups are those of TRL's batch, P, and behind them those drawn in the place of dead ones: G in all. Rollouts are
    numbered over all groups, n of each, whether generated or not: rollout i of group g is number g n + i.

    Args:
        n: rollouts of a group at most.
        functions: F, of the reward.
        processes: that generate.
        device: of the scores.
    """

    def __init__(self, n: int, functions: int, processes: int, device: torch.device) -> None:
        self.n, self.processes = n, processes
        self.asked: list[int] = []  # rollouts of each wave, with those that are repeated for equal parts
        self.repeated = False  # whether rollouts were generated and dropped
        self.scores_GNF = torch.zeros(0, n, functions, device=device)  # NaN: not generated, or not scored
        self.process_GN = torch.zeros(0, n, dtype=torch.int64)  # that generated it
        self.generated: list[int] = []  # rollouts of each group
        self.status: list[Status] = []
        self.inputs: list[Batch] = []  # of each group; of this process only those it needs
        # of this process, a value for each rollout
        self.numbers: list[int] = []
        self.prompt_ids: list[list[int]] = []
        self.completion_ids: list[list[int]] = []
        self.completions: list[Any] = []
        self.logprobs: list[Any] | None = []
        self.more: list[Conversation] = []  # none where rollouts are completions of the data set's text

    def add_groups(self, inputs: Iterable[Batch]) -> range:
        """Add groups without rollouts; return their numbers."""
        first = len(self.inputs)
        self.inputs += inputs
        new = len(self.inputs) - first
        functions = self.scores_GNF.size(2)
        self.scores_GNF = torch.cat([self.scores_GNF, self.scores_GNF.new_full((new, self.n, functions), torch.nan)])
        self.process_GN = torch.cat([self.process_GN, torch.zeros(new, self.n, dtype=torch.int64)])
        self.generated += [0] * new
        self.status += [Status.OPEN] * new
        return range(first, first + new)

    def add(
        self, wave: Wave, places: Sequence[Place], output: tuple[Any, ...], more: list[Conversation], scores: Tensor
    ) -> None:
        """Add a wave.

        Args:
            places: of this process's rollouts.
            output: what `_generate` returned; what was generated for repeated places is dropped, of `more` too.
            scores: of all processes, `[rollouts of the wave, F]`.
        """
        real = len(places)
        self.asked.append(sum(wave.asked_counts))
        self.repeated |= self.asked[-1] > wave.total
        prompt_ids, completion_ids, _, completions, logprobs, *_ = output
        self.numbers += [group * self.n + number for group, number in places]
        self.more += more[:real]
        self.prompt_ids += prompt_ids[:real]
        self.completion_ids += completion_ids[:real]
        self.completions += completions[:real]
        self.logprobs = None if self.logprobs is None or logprobs is None else self.logprobs + logprobs[:real]
        groups, numbers = torch.tensor(wave.groups), slice(wave.start, wave.start + wave.size)
        by_group = (len(groups), wave.size)
        self.scores_GNF[groups.to(scores.device), numbers] = scores.view(*by_group, -1)
        process = torch.arange(wave.processes).repeat_interleave(torch.tensor(wave.counts))
        self.process_GN[groups, numbers] = process.view(by_group)
        for group in wave.groups:
            self.generated[group] = wave.start + wave.size

    def sort(self, columns: Mapping[str, list[Any]]) -> None:
        """Put this process's rollouts, and columns that hold a value for each of them, into the order of numbers."""
        order = sorted(range(len(self.numbers)), key=self.numbers.__getitem__)
        lists: list[list[Any]] = [self.numbers, self.prompt_ids, self.completion_ids, self.completions]
        for values in [*lists, self.logprobs or [], self.more, *columns.values()]:
            if len(values) == len(order):
                values[:] = [values[i] for i in order]

    @property
    def tokens(self) -> list[int]:
        """The number of tokens that the policy wrote in each of this process's rollouts."""
        masks = [each.tool_mask for each in self.more] or [None] * len(self.completion_ids)
        pairs = zip(self.completion_ids, masks, strict=True)
        return [len(ids) if mask is None else sum(mask) for ids, mask in pairs]

    @property
    def counts(self) -> list[int]:
        """The number of rollouts of each process."""
        return torch.bincount(self.process_GN[self._there()], minlength=self.processes).tolist()

    def placed(self, values_R: Tensor) -> Tensor:
        """Return `[G, N]` of a value for each rollout, gathered process by process; 0 where nothing was generated."""
        there = self._there()
        numbers = there.flatten().nonzero().flatten()
        by_process = self.process_GN.flatten()[numbers].argsort(stable=True)
        placed = torch.zeros(there.numel(), dtype=values_R.dtype)
        placed[numbers[by_process]] = values_R
        return placed.view_as(there)

    def _there(self) -> Tensor:
        return torch.arange(self.n) < torch.tensor(self.generated).unsqueeze(1)
