"""A trainer that prints nothing between a benchmark's own lines."""

from __future__ import annotations

from typing import Any


def quiet(trainer: Any) -> Any:
    """Return the trainer without the metric dictionaries that transformers prints if it has no progress bar."""
    from transformers import PrinterCallback, logging

    logging.set_verbosity_error()
    trainer.remove_callback(PrinterCallback)
    return trainer
