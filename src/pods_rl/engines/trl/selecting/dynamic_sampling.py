"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): further prompts where rewards of a group are all equal.

The prompts are generated before TRL builds its batch: a live group is trained in the rows of a dead one. Groups that
are still dead after the last round stay, with advantages of 0.
"""

from __future__ import annotations

import math

import torch
from datasets import IterableDataset
from torch import Tensor

from ....errors import UserError
from ....selection import is_constant
from ...seeds import seeded_generator
from ..compat import Batch, TRLTrainer
from ..config import group_sizes
from .generation import Round


class DynamicSampling:
    """Adds groups of new prompts to a generation, at most `dynamic_sampling_rounds` times.

    Raises:
        UserError: the prompts are a stream.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        is_on = trainer.args.dynamic_sampling
        self.rounds = trainer.args.dynamic_sampling_rounds if is_on else 0
        self.drawn = 0  # new prompts so far; after a resume with the same number it continues with the same prompts
        if is_on and isinstance(trainer.train_dataset, IterableDataset):
            raise UserError(
                "dynamic_sampling draws new prompts by their index, and a stream (IterableDataset) has none: pass "
                "a Dataset, or set dynamic_sampling: false."
            )

    def is_dead(self, round_: Round) -> Tensor:
        """Return which groups have equal rewards, bool `[P]`."""
        return is_constant(round_.record.scored_rewards(), self._trainer.args.reward_tolerance)

    def new_rows(self, count: int, example: Batch) -> list[Batch]:
        """Return TRL's rows of at least `count` new prompts for this process, with the columns of `example`.

        Each prompt has as many rows, and each process: more prompts are drawn if the processes could not share these.
        """
        trainer = self._trainer
        processes = trainer.accelerator.num_processes
        n, _ = group_sizes(trainer.args)
        each = trainer.args.sampler_rows  # of each prompt
        # With a multiple of `unit` prompts, all processes have equally many rows and generate equally many rollouts.
        unit = processes // math.gcd(processes, each, n)
        numbers = self.draw(math.ceil(count / unit) * unit)
        rows_of_process = len(numbers) * each // processes
        first = trainer.accelerator.process_index * rows_of_process
        # A column that only `example` has was added by a subclass, which adds it to these rows too.
        columns = [name for name in example if name in trainer.train_dataset.column_names]
        read: dict[int, Batch] = {}  # by prompt, its row of the data
        rows: list[Batch] = []
        for row in range(first, first + rows_of_process):
            prompt = row // each
            if prompt not in read:
                read[prompt] = trainer.train_dataset[numbers[prompt]]
            rows.append({name: read[prompt][name] for name in columns})
        return rows

    def draw(self, count: int) -> list[int]:
        """Return the data set's indices of the next new prompts, the same on every process: shuffled epoch by epoch."""
        numbers: list[int] = []
        size = len(self._trainer.train_dataset)
        while len(numbers) < count:
            epoch, start = divmod(self.drawn, size)
            # Seeded differently from the sampler of the training data, which takes the seed itself.
            generator = seeded_generator(self._trainer.args.seed, epoch)
            order = torch.randperm(size, generator=generator)
            of_this_epoch = order[start : start + count - len(numbers)].tolist()
            numbers += of_this_epoch
            self.drawn += len(of_this_epoch)
        return numbers
