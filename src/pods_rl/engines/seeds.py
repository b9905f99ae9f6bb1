"""The random draws of every engine: one formula from the numbers that they may depend on."""

from __future__ import annotations

from hashlib import blake2b

import torch


def seeded_generator(*parts: int | str) -> torch.Generator:
    """Return the generator of a rule that draws, from the run's seed and what tells its draws apart, such as the step.

    Its seed depends on these numbers and texts alone, and is the same in every version of Python.

    >>> torch.rand(2, generator=seeded_generator(0, 7)).equal(torch.rand(2, generator=seeded_generator(0, 7)))
    True
    """
    # Python's `hash` of a text differs from process to process.
    seed = int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


class StepCounter:
    """Numbers what happens several times in a step, such as its generations.

    >>> counter = StepCounter()
    >>> [counter.number(step) for step in (0, 0, 1)]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self._step = -1
        self._number = 0

    def number(self, step: int) -> int:
        """Return how often this was called before in this step."""
        self._number = self._number + 1 if step == self._step else 0
        self._step = step
        return self._number
