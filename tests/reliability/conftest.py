"""The trainer over a small random model that the engine's own tests use."""

from __future__ import annotations

from ..engines.conftest import dataset, make_trainer, random_model, tokenizer

__all__ = ["dataset", "make_trainer", "random_model", "tokenizer"]
