"""Pools of workers: each starts on its first question; if it hangs, it is killed with its processes and replaced.

Fresh workers are started as plain commands, so that they load little and do not import the user's main module again.
Forked workers are copies of this process, for a function that cannot be imported elsewhere. The rest is the same.
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
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import LifoQueue
from typing import Any

from .processes import CAN_FORK, Forked, Reply, end_leader, frame, send, signals_held, unframe
from .serve import Work, empty_input, lead

START_LIMIT = 120.0  # seconds for a process to import what it needs, on the busiest of machines
MAX_WORKERS = 4
_READ_BYTES = 1 << 16
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pods_rl.rewards.sandbox.serve import main
main(*sys.argv[2:])
"""
_starting = threading.Lock()  # prevents a fork from inheriting a half-open pipe of another worker


class WorkerPool:
    """`size` workers that answer questions.

    They end with `close`, at the interpreter's exit, or when this process dies. Safe to use from several threads.

    Args:
        size: None: one per core, at most `MAX_WORKERS`.
        limit: seconds an answer may take at most.
        runs_user_code: the work may start processes of its own; they end with a lost answer.
    """

    def __init__(self, size: int | None, limit: float, *, runs_user_code: bool) -> None:
        if limit <= 0 or (size is not None and size < 1):
            raise ValueError(f"a pool needs size >= 1 and limit > 0 seconds: got {size} and {limit}")
        self.size = size or min(MAX_WORKERS, os.cpu_count() or 1)
        self.limit = limit
        self.runs_user_code = runs_user_code
        self._workers: LifoQueue[_Worker] = LifoQueue()  # the last one used is the one most likely running
        self._all = [_Worker(self) for _ in range(self.size)]
        for worker in self._all:
            self._workers.put(worker)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="pods-scorer")
        atexit.register(self.close)

    def launch(self, questions: int, replies: int) -> subprocess.Popen[bytes] | Forked:
        """Start a process that leads (`serve.lead`) on these ends of two pipes."""
        raise NotImplementedError

    def start_error(self, reply: Reply, code: int | None) -> Exception:
        """Return the error to raise if a process did not start.

        Args:
            reply: "refused" with a UserError's text, or as after a question.
            code: the process's exit code, if it ended.
        """
        return RuntimeError(f"a scoring process did not start: {reply.value or reply.kind}, exit code {code}")

    def ask(self, questions: Sequence[Any], limit: float, patience: float) -> list[Reply]:
        """Ask in parallel; return replies in order. Each may take `limit` seconds of processor time (0: no limit) and
        `patience` of wall time. Raises `start_error` if a process cannot start.
        """
        return list(self._threads.map(partial(self._ask_one, limit=limit, patience=patience), questions))

    def start(self) -> None:
        """Start one process, unless it is running."""
        worker = self._workers.get()
        try:
            worker.start()
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """End every process. A closed pool cannot be used again; closing twice is fine.

        In a forked copy of this process it does nothing: the processes belong to the parent.
        """
        atexit.unregister(self.close)
        for worker in self._all:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.stop()

    def _ask_one(self, question: Any, limit: float, patience: float) -> Reply:
        worker = self._workers.get()
        try:
            return worker.ask(question, limit, patience)
        finally:
            self._workers.put(worker)


class FreshPool(WorkerPool):
    """A pool of fresh interpreters: each calls the function at a path for the `Work` that it does.

    Args:
        maker: `module:function`, and the texts that it is called with.
    """

    def __init__(self, size: int | None, limit: float, maker: Sequence[str], *, runs_user_code: bool) -> None:
        super().__init__(size, limit, runs_user_code=runs_user_code)
        self._maker = maker

    def launch(self, questions: int, replies: int) -> subprocess.Popen[bytes]:
        path = json.dumps(list(dict.fromkeys(sys.path)))
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, path, *self._maker],
            stdin=questions,
            stdout=replies,
            stderr=None if self.runs_user_code else subprocess.DEVNULL,  # show the output of users' rewards
            start_new_session=True,  # Ctrl-C is for the training process alone; a group to kill
        )


class ForkedPool(WorkerPool):
    """A pool of forked copies of this process that run a user's function."""

    def __init__(self, size: int, limit: float, work: Work) -> None:
        super().__init__(size, limit, runs_user_code=True)
        self._work = work

    def launch(self, questions: int, replies: int) -> Forked:
        def run() -> None:
            os.setsid()
            empty_input()
            lead(questions, replies, lambda: self._work)

        return Forked(run)


class _Worker:
    """One process of a pool, started when first asked and again after it was killed."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._pipes: tuple[int, ...] = ()  # for questions and for replies
        self._numbers = itertools.count(1 + secrets.randbits(62))  # of requests; not to be guessed
        _workers.add(self)

    def ask(self, question: Any, limit: float, patience: float) -> Reply:
        self.start()
        # The child ends itself at its limit; if that fails, the pool kills the process.
        number = next(self._numbers)
        line, late = self._exchange(frame(number, [question, limit, patience]), patience + 1.0)
        reply = unframe(line, number)
        if late or reply.kind == "garbled" or (reply.lost and self._pool.runs_user_code):
            self.stop()
        return Reply("timeout") if late and reply.lost else reply

    def start(self) -> None:
        """Ensure that the process runs and is ready. Raises the pool's `start_error`."""
        if self._process and self._process.poll() is None:
            return
        self.stop()
        with _starting, signals_held():
            questions, to_write = os.pipe()
            to_read, replies = os.pipe()
            self._pipes = (to_write, to_read)
            try:
                self._process = process = self._pool.launch(questions, replies)
            finally:
                os.close(questions)
                os.close(replies)
        try:
            line, late = self._exchange(b"", START_LIMIT)
        except BaseException:  # a signal: the process must not count as started
            self.stop()
            raise
        reply = Reply("timeout") if late else unframe(line, 0)
        if reply.kind != "gave":
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.0 if late else 5.0)  # its pipe is closed: it is about to end
            code = process.poll()
            self.stop()
            raise self._pool.start_error(reply, code)

    def kill(self) -> None:
        """End the process, its child and all processes of the child."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        if CAN_FORK:
            end_leader(process.pid)
        elif isinstance(process, subprocess.Popen):
            process.kill()

    def stop(self) -> None:
        """`kill`, and forget the process; only while no thread asks it."""
        self.kill()
        if self._process:
            self._process.wait()
        self.forget()

    def forget(self) -> None:
        pipes, self._pipes, self._process = self._pipes, (), None
        for descriptor in pipes:
            os.close(descriptor)

    def _exchange(self, line: bytes, limit: float) -> tuple[bytes, bool]:
        """Send a line and wait at most `limit` seconds for a reply; return it (or nothing) and whether time ran out."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(limit, give_up)
        timer.daemon = True
        timer.start()
        reply = bytearray()
        with suppress(OSError):  # the process, or its pipe, is gone
            to_write, to_read = self._pipes
            send(to_write, line)
            while not reply.endswith(b"\n") and (data := os.read(to_read, _READ_BYTES)):
                reply += data
        timer.cancel()
        timer.join()  # waits for a kill in progress, which must not hit the next answer
        return bytes(reply), late.is_set()


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _forget_all() -> None:
    global _starting
    _starting = threading.Lock()  # the parent may hold its own
    for worker in list(_workers):
        worker.forget()


if CAN_FORK:
    os.register_at_fork(after_in_child=_forget_all)  # a copy of this process must not reach its workers
