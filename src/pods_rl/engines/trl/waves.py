"""Waves of a generation: which rollouts each process generates, and what stops a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from datasets import IterableDataset
from torch import Tensor

from ...errors import UserError
from ...rollouts.allocating import Refill
from ...rollouts.stopping import Status, Stopping, roulette_draws
from .compat import TRLTrainer
from .config import PODSConfig


class Place(NamedTuple):
    """A rollout: its group, and its number in the group."""

    group: int
    number: int


class Wave(NamedTuple):
    """Further rollouts of some groups, as many of each, in equal parts for the processes, to within one.

    Their positions count over all processes, group by group.

    Args:
        groups: that generate further.
        start: number of the first rollout of each.
        size: rollouts of each.
        processes: that share them.
        equal: every process must generate as many, in whole groups over all of them, as TRL's vLLM does: the last group
            is repeated, and what is generated for it again is dropped.

    >>> wave = Wave(groups=(0, 3), start=4, size=3, processes=4)
    >>> [[tuple(place) for place in wave.places(process)] for process in range(4)]
    [[(0, 4)], [(0, 5), (0, 6)], [(3, 4)], [(3, 5), (3, 6)]]
    """

    groups: tuple[int, ...]
    start: int
    size: int
    processes: int = 1
    equal: bool = False

    @property
    def total(self) -> int:
        return len(self.groups) * self.size

    def places(self, process: int) -> list[Place]:
        """The rollouts of a process."""
        first, last = (min(position, self.total) for position in self._part(process))
        return [self._place(position) for position in range(first, last)]

    def asked(self, process: int) -> list[Place]:
        """What a process generates: its rollouts, and repeated ones behind them, at least one."""
        repeated = [self._place(min(position, self.total - 1)) for position in range(*self._part(process))]
        return repeated or [self._place(0)]

    @property
    def counts(self) -> list[int]:
        """The number of rollouts of each process."""
        parts = [self._part(process) for process in range(self.processes)]
        return [min(last, self.total) - min(first, self.total) for first, last in parts]

    @property
    def asked_counts(self) -> list[int]:
        """The number of rollouts that each process generates, repeated ones included."""
        parts = [self._part(process) for process in range(self.processes)]
        return [max(last - first, 1) for first, last in parts]

    def _place(self, position: int) -> Place:
        return Place(self.groups[position // self.size], self.start + position % self.size)

    def _part(self, process: int) -> tuple[int, int]:
        total = self.total
        if self.equal:  # whole groups, of which the processes can have equal parts
            whole = self.processes // math.gcd(self.processes, self.size)
            total = -(-len(self.groups) // whole) * whole * self.size
        return process * total // self.processes, (process + 1) * total // self.processes


class RoundPlan:
    """How the generations of a trainer go: the sizes of waves, what stops a group, and what is drawn in them.

    Args:
        trainer: whose settings, reward functions and training prompts are read.

    Raises:
        UserError: settings of waves that cannot work (see `planning.rollouts`), an `answer_reward` that is no reward
            function, or waves in which nothing could stop a group; prompts to refill from that have no length.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._last = (-1, 0)  # step, generations in it
        self._drawn = 0  # prompts for the places of dead groups, while nothing is refilled
        self.refill: Refill | None = None
        self.read(trainer)

    def read(self, trainer: TRLTrainer, **keys: Any) -> None:
        """Take the trainer's settings, after setting these keys, for the next generation; `prompts_drawn` goes on."""
        args, drawn = trainer.args, self.prompts_drawn
        for key, value in keys.items():
            setattr(args, key, value)
        self.n, self.m = rollouts_of(args), trainer.num_generations
        self._weights = trainer.reward_weights
        self._answer = self._decides = _answer_column(trainer)  # None: the total reward
        self.sizes = args.wave_sizes()
        self.stopping = None if args.rollout_waves is None else self._stopping(trainer)
        self.refill = None
        if args.dead_groups == "refill":
            if isinstance(trainer.train_dataset, IterableDataset):
                raise UserError(
                    "dead_groups = refill draws further prompts by their number, and a stream (IterableDataset) has "
                    "none: give a Dataset, or set dead_groups: keep or share."
                )
            self.refill = Refill(args.seed, len(trainer.train_dataset))
        self.prompts_drawn = drawn
        self.spreads_prompts = len(self.sizes) > 1 or args.dead_groups != "keep"

    @property
    def prompts_drawn(self) -> int:
        """How many prompts were drawn for the places of dead groups, in the whole run; kept in checkpoints."""
        return self.refill.drawn if self.refill else self._drawn

    @prompts_drawn.setter
    def prompts_drawn(self, drawn: int) -> None:
        self._drawn = drawn
        if self.refill:
            self.refill.drawn = drawn

    @property
    def ends(self) -> list[int]:
        """How many rollouts a group has after each wave."""
        return list(accumulate(self.sizes))

    def key(self, seed: int, step: int) -> tuple[int, int, int]:
        """Return the key of the next generation, with which the keys of its rollouts begin."""
        count = self._last[1] + 1 if self._last[0] == step else 0
        self._last = (step, count)
        return seed, step, count

    def answers(self, scores: Tensor) -> Tensor:
        """Return the rewards that decide which groups are dead: the answer's, or without one the total.

        Args:
            scores: `[..., F]` of the reward functions.
        """
        return self._rewards(scores, self._answer)

    def _rewards(self, scores: Tensor, column: int | None) -> Tensor:
        if column is not None:
            return scores[..., column].cpu()
        total = (scores * self._weights.to(scores)).nansum(dim=-1)
        return total.masked_fill(scores.isnan().all(dim=-1), torch.nan).cpu()

    def statuses(self, scores_PTF: Tensor, key: Sequence[int], groups: Sequence[int]) -> list[Status]:
        """Return the status of groups that have generated T rollouts each."""
        if self.stopping is None:
            return [Status.FULL if scores_PTF.size(1) == self.n else Status.OPEN] * len(groups)
        draws, rewards = roulette_draws(key, groups), self._rewards(scores_PTF, self._decides)
        return [Status(int(status)) for status in self.stopping.statuses(rewards, draws)]

    def weights(self, scores_GNF: Tensor, key: Sequence[int]) -> Tensor | None:
        """Return the weight in the loss of each group that was not given up by chance, `[G]`; None: all 1."""
        if self.stopping is None or self.stopping.give_up_after is None or self.stopping.give_up_probability == 1:
            return None
        draws = roulette_draws(key, range(len(scores_GNF)))
        return self.stopping.weights(self._rewards(scores_GNF, self._decides), draws)

    def _stopping(self, trainer: TRLTrainer) -> Stopping:
        args, low, high = trainer.args, None, None
        if args.reward_range is not None:
            self._decides = None
            low, high = args.reward_range
        elif self._decides is not None:
            low, high = getattr(trainer.reward_funcs[self._decides], "range", None) or (0.0, 1.0)
            others = [weight for i, weight in enumerate(self._weights.tolist()) if i != self._decides]
            own = self._weights[self._decides].item()
            if own and not any(others):  # the total, by which the rule selects: its ties are those of the certificate
                self._decides, (low, high) = None, sorted((own * low, own * high))
        return args.stopping(low, high)


def _answer_column(trainer: TRLTrainer) -> int | None:
    name, names = trainer.args.answer_reward, trainer.reward_func_names
    if name is not None and name not in names:
        raise UserError(f"answer_reward = {name}: expected one of the reward functions: {', '.join(names)}.")
    return None if name is None else names.index(name)


def rollouts_of(args: PODSConfig) -> int:
    """Return n; PODSConfig sets it when it is built."""
    assert args.num_rollouts is not None
    return args.num_rollouts
