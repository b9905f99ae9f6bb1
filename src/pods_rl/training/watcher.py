"""Whatever only watches a run: a tracker, the display, the ledger. If it raises, the run continues without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..distributed import get_rank
from ..text import console, safe_text


class Watcher:
    """Calls what only watches a run. After its first exception it is dropped, with one warning.

    Methods of the object that it is made with are called through it.

    >>> class Display:
    ...     def show(self, text): raise OSError("no terminal")
    >>> shown = Watcher("the display", Display())
    >>> shown.show("step 1") is None, shown.dropped
    (True, True)

    Args:
        name: what to call it in the warning.
        target: the object; None: only `attempt` is used.
        raises: exceptions that end the run nevertheless.
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
        """Return what the call returns; None once this is dropped."""
        if self.dropped:
            return None
        try:
            return call(*args, **kwargs)
        except self._raises:
            raise
        except Exception as error:
            self.drop(error)
            return None

    def drop(self, error: Exception) -> None:
        """Warn, and make no more calls."""
        self.dropped = True
        self._on_drop()
        if get_rank() == 0:
            reason = safe_text(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            console(stderr=True).print(
                f"[yellow]Warning:[/yellow] {safe_text(self._name)} raised {reason}. The run continues without it."
            )
