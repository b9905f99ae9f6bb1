"""What all parts of a run share while it is made, and what its directory says about it from its begin to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..distributed.signals import Stop
from ..errors import Interrupted, UserError
from ..recipe import Recipe
from ..runs import RunWriter, last_clocks
from ..runs.checkpoints import clean, last_good
from ..runs.files import CHECKPOINTS, write_failure
from .display import Watcher


@dataclass
class Context:
    """A run on one of its processes.

    A new run has its recipe, environment and status in its directory at once. A resumed run keeps its earlier ones
    until it trains, so that a resume that is refused or interrupted leaves them as they were.

    Args:
        recipe: what to train.
        output: the run's directory.
        writer: writes the directory. None on the processes that do not write.
        shown: the display.
        stop: collects the signals that end the run after a step.
    """

    recipe: Recipe
    output: Path
    writer: RunWriter | None
    shown: Watcher
    stop: Stop
    _begun: bool = field(default=False, init=False)  # whether the directory has the recipe and a status of this run

    def begin(self) -> None:
        """Write that the run has begun."""
        if not self.writer or self._begun:
            return
        self._begun = True
        self.writer.write_config(self.recipe.to_yaml())
        self.writer.write_status("running", reason="loading")
        clean(self.output / CHECKPOINTS)

    @contextmanager
    def status_at_end(self) -> Iterator[None]:
        """Inside, write the status of a run that ends early by an exception.

        The error of a file that cannot be written becomes one line that says how to continue.
        """
        try:
            yield
        except BaseException as error:
            self.stop.over()
            shown_error: BaseException = error
            full = write_failure(error)
            if full:
                checkpoint, _ = last_good(self.output / CHECKPOINTS, hashes=False)
                if checkpoint:
                    advice = f"resume from {checkpoint.name} with: pods train --output {self.output} --resume"
                else:
                    advice = "start again"
                shown_error = UserError(f"Cannot write to {self.output}: {full}. Free some space, then {advice}")
            state = "stopped" if isinstance(shown_error, KeyboardInterrupt) else "failed"
            says_all = isinstance(shown_error, Interrupted)
            reason = str(shown_error) if says_all else f"{type(shown_error).__name__}: {shown_error}"
            if self.writer and self._begun:
                with suppress(OSError):  # the disk is full, which the error itself reports
                    self.writer.write_status(state, reason=reason, **last_clocks(self.output))
            if shown_error is error:
                raise
            raise shown_error from error
