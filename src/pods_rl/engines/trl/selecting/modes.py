"""What a PODSTrainer is doing: one mode at a time, which holds what only that mode needs.

TRL calls the same methods to train, to evaluate and for the prompts of dynamic sampling. They read the mode. A mode is
entered inside another and left to it again:

    Resting, Measuring -> Generating -> Sampling
    Resting, Measuring -> Redrawing -> Generating -> Sampling    (dynamic sampling, with a subclass's method)

An evaluation has no mode of its own: it runs TRL's methods in `Resting` or `Measuring`, where they change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..batching import BatchPlan
from ..step.turns import Turns
from .generation import Built, Generation


@dataclass(frozen=True)
class Resting:
    """Between generations: the next one is of the rows that TRL passes."""


@dataclass(frozen=True)
class Measuring:
    """Between generations, for `measure`: the next one is of new prompts, and has other group sizes."""

    plan: BatchPlan


@dataclass(frozen=True)
class Redrawing:
    """New prompts of dynamic sampling pass through a subclass's method, which calls ours."""

    results: list[Built] = field(default_factory=list)  # one for each of these calls


@dataclass(frozen=True)
class Generating:
    """TRL's method runs on n rows of each prompt."""

    generation: Generation


@dataclass(frozen=True)
class Sampling:
    """TRL's `_generate` runs: the policy writes the turns of the rollouts of a generation."""

    turns: Turns


Mode: TypeAlias = Resting | Measuring | Redrawing | Generating | Sampling
