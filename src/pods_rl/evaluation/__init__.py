"""Evaluation: accuracy, pass@k and form of a policy on a task, during training or of any checkpoint."""

from __future__ import annotations

from .evaluator import Answer, Evaluation, evaluate, pass_at_k
from .sampling import Completion, GenerateSampler, Sampler, Sampling

__all__ = [
    "Answer", "Completion", "Evaluation", "GenerateSampler", "Sampler", "Sampling", "evaluate", "pass_at_k",
]  # fmt: skip
