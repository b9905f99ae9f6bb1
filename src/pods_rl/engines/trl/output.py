"""What TRL prints and writes for people, made harmless: completions on the terminal, the model card.

Overridden of TRL and transformers: `log`, `create_model_card`; `tests/engines/test_contract.py` pins their signatures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from trl import GRPOTrainer

from ...text import plain_text


class OutputMixin(GRPOTrainer):
    """What PODSTrainer changes of what TRL prints and saves; nothing of it is read in training."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With `log_completions` TRL prints prompts and completions as they are: they are escaped before it does."""
        if self.log_completions:
            for rows in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
                _escape(rows)
        super().log(logs, start_time)

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Write the card also where a name is not UTF-8, as a folder's may be."""
        super().create_model_card(model_name and plain_text(model_name), *args, **kwargs)


def _escape(rows: deque[Any] | list[Any]) -> None:
    shown = [harmless(entry) for entry in rows]
    rows.clear()
    rows.extend(shown)


def harmless(entry: Any) -> Any:
    """A text, or a chat's messages, without what steers a terminal.

    >>> harmless([{"role": "user", "content": "\\x1b[2J"}])
    [{'role': 'user', 'content': '\\\\x1b[2J'}]
    """
    if isinstance(entry, str):
        return plain_text(entry)
    if isinstance(entry, Mapping):
        return {key: harmless(value) for key, value in entry.items()}
    return [harmless(part) for part in entry] if isinstance(entry, list) else entry
