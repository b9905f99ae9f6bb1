"""What TRL lets out of a run, made harmless: completions on the terminal, a pickle in each checkpoint.

Overridden of TRL and transformers: `log`, `_save`; `tests/engines/test_contract.py` pins their signatures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINING_ARGS_NAME
from trl import GRPOTrainer

from ...terminal import plain_text


class OutputMixin(GRPOTrainer):
    """What PODSTrainer changes of what TRL prints and saves; nothing of it is read in training."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With `log_completions` TRL prints prompts and completions as they are: they are escaped before it does."""
        if self.log_completions:
            for rows in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
                _escape(rows)
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Without `training_args.bin`, a pickle that nothing reads: config.yaml says how the run was made."""
        super()._save(output_dir, state_dict)
        Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)


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
