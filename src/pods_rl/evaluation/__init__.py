"""Evaluation: accuracy, pass@k and form of a policy on a task, in training or of any checkpoint."""

from __future__ import annotations

from .evaluator import evaluate
from .generate import GenerateSampler
from .sampling import Completion, Sampler, Sampling
from .scores import Answer, Evaluation, pass_at_k

__all__ = [
    "Answer",
    "Completion",
    "Evaluation",
    "GenerateSampler",
    "Sampler",
    "Sampling",
    "evaluate",
    "pass_at_k",
]
