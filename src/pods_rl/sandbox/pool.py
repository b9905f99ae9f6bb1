"""Pools of workers: each starts at its first question; one that hangs is killed with its processes and replaced.

Fresh workers are started as plain commands, so that they load little and do not import the user's main module again.
Forked workers are copies of this process, for a function that cannot be imported elsewhere. The rest is the same.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil

from ..distributed.signals import signals_held
from ..errors import UserError
from .worker import HANDLED_BY_TRAINER, Reply, Work, end_leader, fork, frame, lead, unframe

START_LIMIT = 120.0  # seconds for a process to import what it needs, on the busiest of machines
MAX_WORKERS = 4
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pods_rl.sandbox.worker import main
main(*sys.argv[2:])
"""
_starting = threading.Lock()  # prevents a fork from inheriting the other end of another worker's channel


class WorkerPool:
    """`size` workers that answer questions.

    They end with `close`, at the interpreter's exit, or when this process dies. Safe to use from several threads.

    Args:
        size: None: one per core, at most `MAX_WORKERS`.
        work: of workers that are forked from this process; or `module:function` and the texts to call it with, which
            returns the work of fresh interpreters.
        runs_user_code: the work may start processes of its own; they end with a lost answer.
        name: of the work, in the error of a worker that does not start; `advice` says what to do.
    """

    def __init__(
        self, size: int | None, work: Work | Sequence[str], *, runs_user_code: bool, name: str, advice: str = ""
    ) -> None:
        self.size = size or min(MAX_WORKERS, os.cpu_count() or 1)
        self.work = work
        self.runs_user_code = runs_user_code
        self.name = name
        self.advice = advice
        self.workers: list[Worker] = []  # one for each thread, made when the thread starts
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(self.size, "pods-scorer", initializer=self._add_worker)
        atexit.register(self.close)

    def ask(self, questions: Sequence[Any], seconds: float, processor_seconds: float = 0.0) -> list[Reply]:
        """Ask in parallel; return replies in order.

        Each answer may take `seconds` of wall time and `processor_seconds` of processor time (0: no limit). Raises
        UserError if a process cannot start.
        """

        def ask_one(question: Any) -> Reply:
            return self._of_thread.worker.ask([question, processor_seconds], seconds)

        return list(self._threads.map(ask_one, questions))

    def start(self) -> None:
        """Start one process, unless it is running. Raises UserError if it cannot start."""
        self._threads.submit(lambda: self._of_thread.worker.start()).result()

    def close(self) -> None:
        """End every process. A closed pool cannot be used again; closing twice is fine.

        In a forked copy of this process it does nothing: the processes belong to the parent.
        """
        atexit.unregister(self.close)
        for worker in self.workers:
            if worker.process:
                end_leader(worker.process)  # so that no thread waits for it
        self._threads.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.stop()

    def _add_worker(self) -> None:
        self._of_thread.worker = Worker(self)
        self.workers.append(self._of_thread.worker)


class Worker:
    """One process of a pool, started when first asked and again after it was killed."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.process: psutil.Process | None = None
        self.channel: socket.socket | None = None
        self._answered = 0  # the number of the latest request
        _workers.add(self)

    def ask(self, question: Any, seconds: float) -> Reply:
        self.start()
        number = 1 + secrets.randbits(62)  # not to be guessed
        reply = self.exchange(number, frame(number, question), seconds)
        if reply.kind in ("timeout", "crash") and self._pool.runs_user_code:
            self.stop()
        return reply

    def start(self) -> None:
        """Ensure that the process runs and is ready. Raises UserError if it cannot start."""
        if self.process:
            with suppress(psutil.TimeoutExpired):
                self.process.wait(0)
                self.stop()
        if self.process:
            return
        with _starting, signals_held(HANDLED_BY_TRAINER):
            self.channel, channel_of_process = socket.socketpair()
            with channel_of_process:
                work = self._pool.work
                if isinstance(work, Work):
                    self.process = psutil.Process(fork(lambda: lead(channel_of_process.detach(), lambda: work)))
                else:
                    # A user's code may print. Output of the verifier is dropped: its libraries warn of odd answers.
                    output = None if self._pool.runs_user_code else subprocess.DEVNULL
                    paths = list(dict.fromkeys(sys.path))
                    command = [sys.executable, "-c", _PROGRAM, json.dumps(paths), *work]
                    self.process = psutil.Popen(command, stdin=channel_of_process, stdout=output, stderr=output)
        try:
            reply = self.exchange(0, b"", START_LIMIT)
            if reply.kind == "refused":
                raise UserError(reply.value)
            if reply.kind != "gave":
                reasons = {"timeout": f"no import within {START_LIMIT:g} s", "crash": "the import ended its process"}
                reason = str(reasons.get(reply.kind, reply.value)).rstrip(".")
                raise UserError(
                    f"{self._pool.name} did not start in a process of its own: {reason}. {self._pool.advice}"
                )
        except BaseException:  # also a signal: the process must not count as started
            self.stop()
            raise

    def stop(self) -> None:
        """End and forget the process, its child and all processes of the child; only while no thread asks it."""
        if self.process:
            end_leader(self.process)
            self.process.wait()
        self.forget()

    def forget(self) -> None:
        if self.channel:
            self.channel.close()
        self.process = None
        self.channel = None

    def exchange(self, number: int, request: bytes, seconds: float) -> Reply:
        """Send a request and return the reply to it. A process that has not replied properly by then is ended."""
        assert self.channel
        channel = self.channel
        line = bytearray()
        failure = "crash"
        try:
            channel.settimeout(seconds)
            until = time.monotonic() + seconds
            channel.sendall(request)
            while not line.endswith(b"\n"):
                channel.settimeout(max(until - time.monotonic(), 1e-6))
                received = channel.recv(1 << 16)
                if not received:
                    raise ConnectionResetError
                line += received
                first, end, rest = line.partition(b"\n")
                if end and unframe(bytes(first), self._answered) == Reply("crash"):
                    # The child ended just after its answer to the question before, and the leader could not know of it.
                    line = rest
        except TimeoutError:
            failure = "timeout"
        except OSError:  # the process, or its channel, is gone
            pass
        self._answered = number
        reply = unframe(bytes(line), number)
        if reply is None:
            self.stop()
            return Reply(failure)
        return reply


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forget_all() -> None:
    global _starting
    _starting = threading.Lock()  # the parent may hold its own
    for worker in list(_workers):
        worker.forget()


os.register_at_fork(after_in_child=_forget_all)  # a copy of this process must not reach its workers
