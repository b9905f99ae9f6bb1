"""Evaluation: accuracy, pass@k and form of a policy on a task, during training or of any checkpoint."""

from __future__ import annotations

from .conversation import Talking
from .evaluator import Answer, Evaluation, evaluate, pass_at_k
from .sampling import Completion, GenerateSampler, RowsDone, Sampler, Sampling

__all__ = [
    "Answer",
    "Completion",
    "Evaluation",
    "GenerateSampler",
    "RowsDone",
    "Sampler",
    "Sampling",
    "Talking",
    "evaluate",
    "pass_at_k",
]
