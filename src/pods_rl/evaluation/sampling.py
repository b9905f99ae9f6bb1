"""What every backend that samples completions has in common: what goes in, what comes out, how rows are seeded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import UserError
from ..recipe import Recipe

RowsDone = Callable[[int, int], None]  # called with the rows done and all rows of this process


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Args:
        temperature: 0 means greedy; nothing else shapes the distribution (no top-k, top-p or penalties).
        max_completion_length: tokens after which a completion is cut.
        batch_size: rows that `generate` completes at once.
        seed: of all draws; each row has its own, so they depend on neither batches nor processes.
        chat_template_kwargs: what the chat template is told besides the messages.
    """

    temperature: float = 1.0
    max_completion_length: int = 256
    batch_size: int = 256
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.max_completion_length < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError(
                f"got {self}: expected a temperature and a seed of at least 0, a max_completion_length and a "
                "batch_size of at least 1"
            )


@dataclass(frozen=True)
class Completion:
    """One sampled answer: its text without special tokens, its length in tokens, and whether it ended by itself."""

    text: str
    tokens: int
    ended: bool


class Sampler(Protocol):
    """A policy that completes prompts; `backend` names how."""

    backend: str
    tokenizer: Any

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """One completion to each prompt (token ids), in order; `rows` number the rows, for their seeds."""


def render(tokenizer: Any, prompt: Any, **options: Any) -> str:
    """A prompt as the text the model continues: text as it is, chat messages in the model's own template.

    `options` are what the template is told besides (`template_options`).

    Raises UserError for messages where the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path or 'this policy'} has no chat template, and the task's prompts "
            "are chat messages: set prompt_style: plain to write them as text."
        )
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **options))


def encode(tokenizer: Any, prompt: Any, text: str) -> list[int]:
    """The tokens of a rendered prompt; a chat template has written its special tokens already."""
    return list(tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])


def template_options(recipe: Recipe) -> dict[str, Any]:
    """A recipe's `chat_template_kwargs`, a mapping or its JSON, as TRL takes it; raises UserError for anything else."""
    given = recipe.values.get("chat_template_kwargs") or {}
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UserError(f"chat_template_kwargs = {given}: expected a mapping, as in {{enable_thinking: false}}.")
    return options
