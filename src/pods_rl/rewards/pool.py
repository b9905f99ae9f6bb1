"""Small pools of scoring processes that are killed and replaced when an answer takes too long.

math-verify's own time limits work in the main thread only, and some answers keep it busy for ever; so may a
reward of a user's. The processes are started as plain commands: no fork of a process with threads, and the user's
main module is not imported again.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import LifoQueue

from ..errors import UserError
from .processes import CAN_FORK, end_leader, frame, signals_held, unframe
from .worker import READY

DEFAULT_LIMIT = 5.0  # seconds an answer: math-verify's own default (its parsing_timeout and timeout_seconds)
FIRST_LIMIT = 0.25  # seconds an answer gets at first: 500 gold answers of MATH-500 took 0.15 at most, most 0.002
BATCH_SECONDS = 4.0  # what a batch spends on a second try of those that took longer
PATIENCE = 10.0  # wall seconds for a second of work, on a busy machine, before a process is taken for dead
START_LIMIT = 120.0  # seconds for a process to import what it needs, on the busiest of machines
MAX_WORKERS = 4

MOST_BYTES = 1 << 16  # of a reply

_NO_ANSWER = ("timeout", "crash", "garbled")
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pods_rl.rewards.worker import main
main(*sys.argv[2:])
"""


class WorkerPool:
    """`size` processes that score pairs of texts, started when first needed.

    They end with `close`, at the interpreter's exit, or when this process dies. Safe to use from several threads.

    Args:
        limit: seconds an answer may take at most.
        function: import path of a reward of a user's; "": math-verify.
    """

    def __init__(self, size: int | None, limit: float, function: str = "") -> None:
        if limit <= 0 or (size is not None and size < 1):
            raise ValueError(f"a pool needs size >= 1 and limit > 0 seconds, but came {size} and {limit}")
        self.size = size or min(MAX_WORKERS, os.cpu_count() or 1)
        self.limit = limit
        self.owner = os.getpid()
        self._workers: LifoQueue[_Worker] = LifoQueue()  # the last one used is the one most likely running
        self._all = [_Worker(function) for _ in range(self.size)]
        for worker in self._all:
            self._workers.put(worker)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="pods-scorer")
        atexit.register(self.close)

    def close(self) -> None:
        """End every process. A closed pool cannot be used again; closing twice is fine.

        In a forked child it ends nothing: the processes are its parent's.
        """
        atexit.unregister(self.close)
        for worker in self._all:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.stop()  # one that a running check had just replaced

    def start(self) -> None:
        """Start one process, unless it runs: it imports the reward. Raises UserError where it cannot."""
        worker = self._workers.get()
        try:
            worker.start()
        finally:
            self._workers.put(worker)

    def ask_one(self, pair: tuple[str, str], limit: float, patience: float) -> str:
        """A process's answer to one pair: a JSON value or one of `_NO_ANSWER`; seconds as in `worker.main`."""
        worker = self._workers.get()
        try:
            return worker.ask(pair, limit, patience)
        finally:
            self._workers.put(worker)


class VerifierPool(WorkerPool):
    """Decide whether pairs of expressions are equal, `size` at a time, `limit` seconds at most each.

    Seconds are of processor time, so that a busy machine makes no honest answer fail (on Windows, which has no such
    limit, of wall time). Every answer of a batch gets `FIRST_LIMIT` seconds; those that took longer are tried again
    with equal shares of `BATCH_SECONDS` a process, up to `limit`. So a few slow answers get all the time they need, and
    a batch in which each one hangs ends after `len(batch) / size * FIRST_LIMIT` seconds.

    `timeouts` counts the answers that were given up, `crashes` those whose process ended by itself
    (out of memory, recursion); both score False.
    """

    def __init__(self, size: int | None = None, limit: float = DEFAULT_LIMIT) -> None:
        super().__init__(size, limit)
        self.timeouts = 0
        self.crashes = 0
        self._lock = threading.Lock()

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Say of each (gold, answer) whether the two are mathematically equal, in order.

        Raises RuntimeError where a process cannot be started: no score is made up for lack of a verifier.

        >>> pool = VerifierPool(size=1)
        >>> pool.verify([(r"\\\\sqrt{8}", r"2\\\\sqrt{2}"), ("x+1", "x")])
        [True, False]
        >>> pool.close()
        """
        first = min(self.limit, FIRST_LIMIT)
        verdicts = list(self._threads.map(self._ask, pairs, [first] * len(pairs)))
        late = [i for i, verdict in enumerate(verdicts) if verdict == "timeout"]
        share = min(self.limit, BATCH_SECONDS * self.size / max(1, len(late)))
        if share > first:
            again = self._threads.map(self._ask, [pairs[i] for i in late], [share] * len(late))
            for i, verdict in zip(late, again, strict=True):
                verdicts[i] = verdict
        with self._lock:
            self.timeouts += verdicts.count("timeout")
            self.crashes += verdicts.count("crash") + verdicts.count("garbled")
        return [verdict == "1" for verdict in verdicts]

    def _ask(self, pair: tuple[str, str], limit: float) -> str:
        # Elsewhere than where it can fork there is no limit of processor time.
        return self.ask_one(pair, limit, limit * PATIENCE if CAN_FORK else limit)


class _Worker:
    """One scoring process, started when first asked and again after it was killed."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1 + secrets.randbits(62))  # of requests; nobody writes the right one by chance

    def ask(self, pair: tuple[str, str], limit: float, patience: float) -> str:
        """Give a JSON value, or one of `_NO_ANSWER`."""
        process = self.start()
        # The process gives up by itself; killing it is for when even that fails.
        number = next(self._numbers)
        line, late = _exchange(process, frame(number, [*pair, limit, patience]), patience + 1.0)
        reply = _read(line, number)
        # A user's reward may have started processes of its own, which end here.
        if late or reply == "garbled" or (self._function and reply in _NO_ANSWER):
            self.stop()
        return "timeout" if late and reply in _NO_ANSWER else reply

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not yet sent cannot be
                if stream:
                    stream.close()

    def start(self) -> subprocess.Popen[bytes]:
        """The process, once it has imported what it needs."""
        if self._process and self._process.poll() is None:
            return self._process
        self.stop()
        with signals_held():
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(list(dict.fromkeys(sys.path))), self._function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self._function else subprocess.DEVNULL,  # what a user's reward prints is theirs to read
                start_new_session=True,  # Ctrl-C is for the training process alone; a group to kill
            )
        try:
            line, late = _exchange(process, b"", START_LIMIT)
        except BaseException:  # a signal: it must not be taken for one that has started
            self.stop()
            raise
        reply = _read(line, 0)
        if reply != READY:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.0 if late else 5.0)  # its pipe is closed: it is about to end
            code = process.poll()
            self.stop()
            raise self._not_started(reply, code, late=late)
        return process

    def _not_started(self, reply: str, code: int | None, *, late: bool) -> Exception:
        if reply.startswith(f"the reward '{self._function}'"):  # said by `get_reward`
            return UserError(reply)
        if self._function:
            why = reply
            if reply in _NO_ANSWER:
                ended = "the process ended while it imported the module" + (f", exit code {code}" if code else "")
                why = f"the import took longer than {START_LIMIT:g} s" if late else ended
            return UserError(
                f"the reward {self._function!r} did not start in a process of its own: {why.rstrip('.')}. Fix its "
                "module" + (", or set reward_seconds: null to import it in the training process alone" if late else "")
            )
        return RuntimeError(
            f"the answer verifier did not start with {sys.executable}; "
            "check that `python -c 'import math_verify'` works there"
        )


def _read(line: bytes, number: int) -> str:
    """The reply in a line: "crash" where there is none, "garbled" where it does not answer this request."""
    try:
        reply = unframe(line, number) if line else "crash"
    except ValueError:
        return "garbled"
    return reply if isinstance(reply, str) else "garbled"


def _exchange(process: subprocess.Popen[bytes], line: bytes, limit: float) -> tuple[bytes, bool]:
    """Send a line and wait for one, at most `limit` seconds; give it (or nothing) and whether time ran out."""
    assert process.stdin
    assert process.stdout
    late = threading.Event()

    def give_up() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()
    reply = b""
    with suppress(OSError, ValueError):  # the process, or its pipe, is gone
        process.stdin.write(line)
        process.stdin.flush()
        reply = process.stdout.readline(MOST_BYTES)
    timer.cancel()
    timer.join()  # a kill under way is over now, so that it cannot hit the next answer
    return reply, late.is_set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process, the child that works for it and what that has started."""
    if not CAN_FORK:
        process.kill()
    elif process.poll() is None:
        end_leader(process.pid)


_default: VerifierPool | None = None
_default_lock = threading.Lock()


def default_pool() -> VerifierPool:
    """Give this process's own pool, made on first use (a forked child makes its own).

    >>> default_pool() is default_pool()
    True
    """
    global _default
    with _default_lock:
        if _default is None or _default.owner != os.getpid():
            _default = VerifierPool()
        return _default


def verifier_losses() -> tuple[int, int]:
    """How many answers this process's own pool has given up so far: timeouts and crashes.

    >>> verifier_losses()[0] >= 0
    True
    """
    pool = _default
    return (pool.timeouts, pool.crashes) if pool and pool.owner == os.getpid() else (0, 0)
