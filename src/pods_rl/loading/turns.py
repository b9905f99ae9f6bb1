"""What rewards read of a policy's completions: the assistant's turn, with the thought that its prompt opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..tasks import Prompt, last_turn
from ..tasks.task import CLOSING, Messages, opened_thought
from .prompts import render


class TurnReader:
    """The texts that rewards grade (`last_turn`), for a policy whose prompts may end with `<think>`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        # Where `</think>` is a special token, completions are decoded without it, so no thought would seem closed.
        self._keeps_tags = CLOSING in self._decode(tokenizer(CLOSING, add_special_tokens=False)["input_ids"])

    def texts(
        self, prompts: Sequence[Prompt], completions: Sequence[str | Messages], completion_ids: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return the text to grade of each completion, in order.

        Equal prompts that follow each other, as those of a group do, are rendered once.
        """
        texts: list[str] = []
        opening = ""
        previous: Prompt | None = None
        for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
            if prompt != previous:
                opening = self._opening(render(self._tokenizer, prompt, **self._options))
                previous = prompt
            texts.append(self._text(opening, completion, ids))
        return texts

    def text(self, rendered: str, completion: str | Messages, ids: Sequence[int]) -> str:
        """Return the text to grade of one completion of a rendered prompt."""
        return self._text(self._opening(rendered), completion, ids)

    def _text(self, opening: str, completion: str | Messages, ids: Sequence[int]) -> str:
        if isinstance(completion, str) or not self._keeps_tags:
            return last_turn(completion, opening)
        return last_turn(completion, opening, self._decode(ids))

    def _opening(self, rendered: str) -> str:
        return opened_thought(rendered) if self._keeps_tags else ""

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
