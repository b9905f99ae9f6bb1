"""Pools of workers: each starts on its first question; if it hangs, it is killed with its processes and replaced.

Fresh workers are started as plain commands, so that they load little and do not import the user's main module again.
Forked workers are copies of this process, for a function that cannot be imported elsewhere. The rest is the same.
A question is `[number, [question, limit, patience]]`: seconds of processor time and of wall time (0: no limit).
"""

from __future__ import annotations

import atexit
import itertools
import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import LifoQueue
from typing import Any, NamedTuple

from ..errors import UserError, raised
from .processes import (
    Reply,
    become_leader,
    end_after,
    end_family,
    end_leader,
    flush,
    fork,
    frame,
    no_copies,
    send,
    signals_held,
    supervise,
    unframe,
)  # fmt: skip

START_LIMIT = 120.0  # seconds for a process to import what it needs, on the busiest of machines
MAX_WORKERS = 4
CLOSED = 97  # exit code of a child whose questions have ended; a reward that calls os._exit gives another
_READ_BYTES = 1 << 16
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pods_rl.sandbox.pool import main
main(*sys.argv[2:])
"""
_starting = threading.Lock()  # prevents a fork from inheriting a half-open pipe of another worker


class Work(NamedTuple):
    """The work of a worker: `answer` maps a question to a JSON value; `prepare` is called in each child."""

    answer: Callable[[Any], Any]
    prepare: Callable[[], object] = flush


class WorkerPool:
    """`size` workers that answer questions.

    They end with `close`, at the interpreter's exit, or when this process dies. Safe to use from several threads.

    Args:
        size: None: one per core, at most `MAX_WORKERS`.
        limit: seconds an answer may take at most.
        work: of workers that are forked from this process; or `module:function` and the texts to call it with, which
            returns the work of fresh interpreters.
        runs_user_code: the work may start processes of its own; they end with a lost answer.
    """

    def __init__(self, size: int | None, limit: float, work: Work | Sequence[str], *, runs_user_code: bool) -> None:
        if limit <= 0 or (size is not None and size < 1):
            raise ValueError(f"a pool needs size >= 1 and limit > 0 seconds: got {size} and {limit}")
        self.size = size or min(MAX_WORKERS, os.cpu_count() or 1)
        self.limit = limit
        self.runs_user_code = runs_user_code
        self._work = work
        self._workers: LifoQueue[_Worker] = LifoQueue()  # the last one used is the one most likely running
        self._all = [_Worker(self) for _ in range(self.size)]
        for worker in self._all:
            self._workers.put(worker)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="pods-scorer")
        atexit.register(self.close)

    def start_error(self, reply: Reply, code: int | None) -> Exception:
        """Return the error to raise if a process did not start, after this reply and with this exit code."""
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

    def launch(self, questions: int, replies: int) -> subprocess.Popen[bytes] | _Forked:
        """Start a process that leads (`lead`) on these ends of two pipes."""
        if isinstance(self._work, Work):
            return _Forked(partial(_lead_forked, questions, replies, self._work))
        path = json.dumps(list(dict.fromkeys(sys.path)))
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, path, *self._work],
            stdin=questions,
            stdout=replies,
            stderr=None if self.runs_user_code else subprocess.DEVNULL,  # show the output of users' rewards
            start_new_session=True,  # Ctrl-C is for the training process alone; a group to kill
        )


class _Worker:
    """One process of a pool, started when first asked and again after it was killed."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._process: subprocess.Popen[bytes] | _Forked | None = None
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
        if self._process is not None and self._process.poll() is None:
            end_leader(self._process.pid)

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


class _Forked:
    """A forked child, with the part of `subprocess.Popen` that a pool uses. `wait` with a timeout does not wait."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.returncode: int | None = None
        self.pid = fork(work)

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            except ChildProcessError:  # a handler of SIGCHLD has already reaped it
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _forget_all() -> None:
    global _starting
    _starting = threading.Lock()  # the parent may hold its own
    for worker in list(_workers):
        worker.forget()


os.register_at_fork(after_in_child=_forget_all)  # a copy of this process must not reach its workers


# -- in the worker ----------------------------------------------------------------------------------------------------


def main(maker: str, *arguments: str) -> None:
    """Serve the work that the function at path `maker` returns for these arguments, over standard input and output.

    The work has an empty standard input, and its output goes to standard error.
    """
    questions, replies = os.dup(0), os.dup(1)  # not inherited by programs
    _empty_input()
    os.dup2(2, 1)  # output of a library must not be read as a reply
    module, _, name = maker.partition(":")
    lead(questions, replies, lambda: getattr(import_module(module), name)(*arguments))


def lead(questions: int, replies: int, make: Callable[[], Work]) -> None:
    """Make the work, confirm it with the reply to request 0, and answer questions until the pipe closes.

    A child answers. It is replaced when it dies, which costs milliseconds, and this process replies "timeout" or
    "crash" for it.
    """
    try:
        become_leader()
        with no_copies():
            work = make()
    except BaseException as error:
        refused = isinstance(error, UserError)
        said = " ".join(str(error).split()) if refused else raised(error)
        _say(replies, 0, Reply("refused" if refused else "raised", said))
        return
    _say(replies, 0, Reply("gave"))
    current = mmap.mmap(-1, 8)  # shared with the child: the number of the request that it works on, or 0
    while True:
        current[:] = bytes(8)
        code = supervise(partial(_serve, questions, replies, work, current))
        if number := int.from_bytes(current[:], "big"):
            _say(replies, number, Reply("timeout" if code in (-signal.SIGPROF, -signal.SIGALRM) else "crash"))
        elif code == CLOSED:
            break
    end_family(os.getpid())


def _lead_forked(questions: int, replies: int, work: Work) -> None:
    os.setsid()
    _empty_input()
    lead(questions, replies, lambda: work)


def _serve(questions: int, replies: int, work: Work, current: mmap.mmap) -> None:
    pipes = _identities(questions, replies)

    def check() -> None:
        """End this process if a reward closed a pipe: its number may now be a file of the reward's."""
        if _identities(questions, replies) != pipes:
            os._exit(1)

    def close() -> None:  # processes that a reward forks do not have the pipes; programs never do
        if _identities(questions, replies) == pipes:
            os.close(questions)
            os.close(replies)

    os.register_at_fork(after_in_child=close)
    work.prepare()
    with open(questions, "rb", closefd=False) as lines:
        while True:
            check()
            line = lines.readline()
            if not line:
                raise SystemExit(CLOSED)
            number, (question, limit, patience) = json.loads(line)
            current[:] = number.to_bytes(8, "big")
            end_after(limit, patience)
            try:
                with no_copies():
                    reply = Reply("gave", work.answer(question))
            except BaseException as error:  # SystemExit too
                reply = Reply("raised", raised(error))
            end_after(0.0, 0.0)
            check()  # during the request: it caused the exit
            current[:] = bytes(8)
            _say(replies, number, reply)


def _identities(*descriptors: int) -> list[tuple[int, int]] | None:
    try:
        return [(status.st_dev, status.st_ino) for status in map(os.fstat, descriptors)]
    except OSError:
        return None


def _say(replies: int, number: int, reply: Reply) -> None:
    with suppress(BrokenPipeError):  # the pool is gone
        send(replies, frame(number, reply))


def _empty_input() -> None:
    """Make standard input empty, for this process and every program that it starts."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.set_inheritable(0, True)
    if null:
        os.close(null)
