"""Verifier processes: they decide whether two expressions are equal, and are killed at a timeout.

math-verify's own timeouts work only in the main thread, and some answers keep it busy forever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import lru_cache

from .sandbox.pool import FreshPool
from .sandbox.processes import CAN_FORK, Reply
from .sandbox.serve import Work, bar_process

DEFAULT_LIMIT = 5.0  # seconds an answer: math-verify's own default (its parsing_timeout and timeout_seconds)
FIRST_LIMIT = 0.25  # seconds an answer gets at first: 500 gold answers of MATH-500 took 0.15 at most, most 0.002
BATCH_SECONDS = 4.0  # of a batch, for a second try of slower answers
PATIENCE = 10.0  # wall seconds for a second of work, on a busy machine, before a process counts as dead
MEMORY_BYTES = 3 << 30  # a tower of powers fills any memory within seconds; past this the process ends

Pair = tuple[str, str]


class VerifierPool(FreshPool):
    """Decide whether pairs of expressions are equal, `size` at a time, `limit` seconds at most each.

    Seconds are of processor time, so that right answers do not fail on a busy machine (on Windows, which has no such
    limit, of wall time). Every answer of a batch gets `FIRST_LIMIT` seconds; those that took longer are tried again
    with equal shares of `BATCH_SECONDS` a process, up to `limit`. So a few slow answers get all the time they need, and
    a batch in which each one hangs ends after `len(batch) / size * FIRST_LIMIT` seconds.

    `timeouts` counts the answers that took too long, `crashes` those whose process ended by itself (out of memory,
    recursion); both score False.
    """

    def __init__(self, size: int | None = None, limit: float = DEFAULT_LIMIT) -> None:
        super().__init__(size, limit, ["pods_rl.rewards.verifier:verification"], runs_user_code=False)
        self.timeouts = 0
        self.crashes = 0
        self._lock = threading.Lock()

    def verify(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return for each (gold, answer) whether the two are mathematically equal, in order.

        Raises RuntimeError if a process cannot start, rather than return a wrong score.

        >>> pool = VerifierPool(size=1)
        >>> pool.verify([(r"\\\\sqrt{8}", r"2\\\\sqrt{2}"), ("x+1", "x")])
        [True, False]
        >>> pool.close()
        """
        first = min(self.limit, FIRST_LIMIT)
        replies = self._verify(pairs, first)
        late = [i for i, reply in enumerate(replies) if reply.kind == "timeout"]
        share = min(self.limit, BATCH_SECONDS * self.size / max(1, len(late)))
        if share > first:
            for i, reply in zip(late, self._verify([pairs[i] for i in late], share), strict=True):
                replies[i] = reply
        with self._lock:
            self.timeouts += sum(reply.kind == "timeout" for reply in replies)
            self.crashes += sum(reply.kind in ("crash", "garbled") for reply in replies)
        return [reply == Reply("gave", True) for reply in replies]

    def start_error(self, reply: Reply, code: int | None) -> Exception:
        return RuntimeError("the answer verifier did not start: check that `python -c 'import math_verify'` works")

    def _verify(self, pairs: Sequence[Pair], limit: float) -> list[Reply]:
        # A system that cannot fork has no limit of processor time.
        return self.ask(pairs, limit, limit * PATIENCE if CAN_FORK else limit)


def verification() -> Work:
    """The work of a verifier process; imports happen before the first answer, outside its time limit."""
    logging.disable(logging.CRITICAL)
    for pair in ((r"( 3, \frac{\pi}{2} )", r"(3, \pi/2)"), ("x^2-1", "(x+1)(x-1)"), ("x<3", r"(-\infty, 3)")):
        _equal(pair)
    _limit_memory()
    return Work(_equal, prepare=bar_process)


def _equal(pair: Pair) -> bool:
    from .equality import equal  # here, since only verifier processes load SymPy

    try:
        return equal(*pair)
    except MemoryError:
        os._exit(1)  # memory can no longer be trusted: a fresh process takes over
    except Exception:
        return False  # an answer that cannot be parsed or compared is wrong


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def default_pool() -> VerifierPool:
    """Return this process's own pool, made on first use (a forked child makes its own).

    >>> default_pool() is default_pool()
    True
    """
    return _pool_of(os.getpid())


@lru_cache
def _pool_of(owner: int) -> VerifierPool:
    return VerifierPool()


def verifier_losses() -> tuple[int, int]:
    """Return how many answers this process's own pool has lost so far: timeouts and crashes.

    >>> verifier_losses()[0] >= 0
    True
    """
    pool = default_pool()
    return pool.timeouts, pool.crashes
