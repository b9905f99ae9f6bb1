"""Workers that are killed when they hang, and the score of one completion: a number, or the failure of its reward."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real

from .worker import Reply


@dataclass(frozen=True)
class RewardFailure:
    """Stands for the score of a completion whose reward raised, or took too long (`late`).

    `error` is the exception, if it was raised in this process.
    """

    reason: str
    late: bool = False
    error: BaseException | None = field(default=None, compare=False)


Scores = list[float] | list[float | RewardFailure]


def as_score(value: object) -> float | None:
    """Return a reward of one completion as a float; None is kept: the reward does not apply.

    Accepts every real number of Python, numpy and torch, also as an array without axes. A number beyond any float is
    NaN. Raises TypeError for anything else, such as text.

    >>> as_score(True), as_score(None), as_score(-10**400)
    (1.0, None, nan)
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy and torch
        with suppress(RuntimeError):  # a tensor without data
            value = value.item()
    if value is None:
        return None
    if not isinstance(value, (Real, Decimal)):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except (OverflowError, ValueError):  # a signalling NaN of Decimal
        return math.nan


def failure(reply: Reply, limit: float) -> RewardFailure:
    """Return the failure that a worker's reply without a score means, after at most `limit` seconds."""
    reasons = {"timeout": f"gave no score within {limit:g} s", "crash": "ended its process"}
    return RewardFailure(reasons.get(reply.kind, f"raised {reply.value}"), late=reply.kind == "timeout")
