"""Calls to what only watches a run: a tracker, the display, the ledger. If it raises, the run continues without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..distributed import get_rank
from ..text import console, safe_text


class Watcher:
    """Passes method calls to an object that only watches a run. It drops the object after its first exception.

    >>> class Display:
    ...     def show(self, text): raise OSError("no terminal")
    >>> shown = Watcher("the display", Display())
    >>> shown.show("step 1") is None, shown.dropped
    (True, True)

    Args:
        name: what to call it in the warning.
        target: the object. If None, only `attempt` is used.
        raises: exceptions that end the run.
        on_drop: called when this is dropped.
    """

    def __init__(
        self,
        name: str,
        target: Any = None,
        *,
        raises: tuple[type[Exception], ...] = (),
        on_drop: Callable[[], object] = lambda: None,
    ) -> None:
        self.dropped = False
        self._name, self._target, self._raises, self._on_drop = name, target, raises, on_drop

    def __getattr__(self, name: str) -> Any:
        return partial(self.attempt, getattr(self._target, name))

    def attempt(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns; None once the object is dropped."""
        try:
            return None if self.dropped else call(*args, **kwargs)
        except Exception as error:
            if isinstance(error, self._raises):
                raise
            self.drop(error)

    def drop(self, error: Exception) -> None:
        """Warn, and make no more calls."""
        self.dropped = True
        self._on_drop()
        if get_rank() == 0:
            reason = safe_text(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            console(stderr=True).print(
                f"[yellow]Warning:[/yellow] {safe_text(self._name)} raised {reason}. The run continues without it."
            )
