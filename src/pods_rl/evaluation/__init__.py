"""Evaluation: accuracy, pass@k and form of a policy on a task, during training or of any checkpoint."""

from __future__ import annotations

from .evaluator import Completion, RowsDone, Sampler, Sampling, evaluate
from .generate import GenerateSampler
from .scores import Answer, Evaluation, pass_at_k

__all__ = [
    "Answer",
    "Completion",
    "Evaluation",
    "GenerateSampler",
    "RowsDone",
    "Sampler",
    "Sampling",
    "evaluate",
    "pass_at_k",
]
