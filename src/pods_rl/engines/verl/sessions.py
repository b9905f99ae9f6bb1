"""The sessions of one prompt in verl's agent loop: started in waves, committed by number, cancelled once decided.

Needs only asyncio, not verl. Each prompt has its own: nothing here waits for another prompt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate


class Sessions:
    """The n sessions of a prompt, of which only the first ones may be needed.

    A session starts with its wave, and a wave starts once the one before is committed. Session i is committed when all
    sessions up to i are scored, whatever the order in which they finish, so that short completions have no advantage.
    As soon as the committed rewards stop the group, every later session is cancelled or never starts, a finished one
    too: its rows wait in `commit` until it is their turn and are never stored.

    Args:
        waves: their sizes, n in all (`rollouts.stopping.wave_sizes`).
        stops: of the rewards committed so far, by number: whether no further session is needed.
    """

    def __init__(self, waves: Sequence[int], stops: Callable[[Sequence[float]], bool]) -> None:
        self.committed: list[float] = []
        self._ends = list(accumulate(waves))
        self._stops = stops
        self._scored: dict[int, float] = {}  # not committed yet
        self._tasks: dict[int, asyncio.Future[object]] = {}
        loop = asyncio.get_running_loop()
        # of each session, whether it starts and whether it is committed; False: the group stopped before
        self._starts: list[asyncio.Future[bool]] = [loop.create_future() for _ in range(self._ends[-1])]
        self._commits: list[asyncio.Future[bool]] = [loop.create_future() for _ in range(self._ends[-1])]
        self._start_wave()

    async def run(self, number: int, session: Callable[[], Awaitable[object]]) -> object:
        """Run a session once its wave starts; return None if the group stops without it.

        A session that fails, or that is never scored, counts as unscored. Its error is raised if it is committed.
        """
        if not await asyncio.shield(self._starts[number]) or self._dropped(number):
            return None
        self._tasks[number] = task = asyncio.ensure_future(session())
        try:
            result = await task
        except BaseException as error:
            self._score(number, math.nan)
            if isinstance(error, Exception) and await asyncio.shield(self._commits[number]):
                raise
            if self._dropped(number):
                return None
            raise
        self._score(number, math.nan)
        return result

    async def commit(self, number: int, reward: float) -> None:
        """Report a session's reward from inside it, and wait until all earlier ones have theirs.

        Raises:
            asyncio.CancelledError: the group stopped without this session.
        """
        self._score(number, reward)
        if not await asyncio.shield(self._commits[number]):
            raise asyncio.CancelledError

    def _dropped(self, number: int) -> bool:
        return self._commits[number].done() and not self._commits[number].result()

    def _score(self, number: int, reward: float) -> None:
        if self._commits[number].done() or number in self._scored:
            return
        self._scored[number] = reward
        while (turn := len(self.committed)) in self._scored:
            self.committed.append(self._scored.pop(turn))
            self._commits[turn].set_result(True)
            if len(self.committed) < len(self._commits) and self._stops(self.committed):
                return self._stop()
            if len(self.committed) in self._ends[:-1]:
                self._start_wave()
        return None

    def _start_wave(self) -> None:
        first = len(self.committed)
        for start in self._starts[first : next(end for end in self._ends if end > first)]:
            start.set_result(True)

    def _stop(self) -> None:
        for number in range(len(self.committed), len(self._commits)):
            self._scored.pop(number, None)
            self._commits[number].set_result(False)
            if not self._starts[number].done():
                self._starts[number].set_result(False)
            if number in self._tasks:
                self._tasks[number].cancel()
