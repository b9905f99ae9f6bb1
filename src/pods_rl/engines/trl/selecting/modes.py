"""What a PODSTrainer is doing: one mode at a time, which holds what only that mode needs.

TRL calls the same methods to train, to evaluate and for the prompts of dynamic sampling. They read the mode. A mode is
entered inside another and left to it again:

    Resting, Measuring -> Evaluating
    Resting, Measuring -> Generating
    Resting, Measuring -> Redrawing -> Generating    (dynamic sampling, with a subclass's method)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..batching import BatchPlan
from .generation import Built, Generation


@dataclass(frozen=True)
class Resting:
    """Between generations: the next one is of the rows that TRL passes."""


@dataclass(frozen=True)
class Evaluating:
    """TRL's methods run as they are: an evaluation never selects."""


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


Mode: TypeAlias = Resting | Measuring | Evaluating | Redrawing | Generating
