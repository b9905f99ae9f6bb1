"""Which part of a training step the time goes to."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...distributed import mark

PHASES = ("rollout", "reward", "selection", "update")


class PhaseClock:
    """Seconds per phase of one step; exactly one phase runs at a time, so the phases sum to the step.

    Accelerators work asynchronously: each switch waits for the device, four times a step.

    Example:
        >>> now = iter([0.0, 1.0, 3.0])
        >>> clock = PhaseClock(device=None, now=lambda: next(now))
        >>> clock.enter("rollout"); clock.enter("update"); clock.stop()
        >>> clock.seconds["rollout"], clock.seconds["update"]
        (1.0, 2.0)
    """

    def __init__(self, device: torch.device | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now = now
        self._phase: str | None = None
        self._since = 0.0
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @property
    def phase(self) -> str | None:
        """The running phase, None between steps."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Close the running phase and start `phase`."""
        now = self._settle()
        mark(phase)
        self._phase, self._since = phase, now

    def stop(self) -> None:
        """Close the running phase, if any."""
        if self._phase is not None:
            self._settle()
            self._phase = None

    def reset(self) -> None:
        """Forget the seconds of the last step."""
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def _settle(self) -> float:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._now()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        return now
