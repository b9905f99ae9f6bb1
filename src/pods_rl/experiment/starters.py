"""Processes that have imported all that a run needs, and fork themselves for each run.

A run needs several seconds of processor time to import torch and TRL. With starters, `pods compare` pays them once for
the runs that it makes one after another. Each run still has a process of its own, which begins in the same state as
every other and whose crash ends nothing else. `cli/starter.py` is what runs in a starter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from ..distributed.signals import PARENT, signals_held
from ..errors import UserError
from .definition import Experiment

_END_SECONDS = 30.0  # to wait for the end of a killed run


class Check(NamedTuple):
    """The request to check the recipe of each arm: the answer is a list of notes, or a UserError."""

    experiment: Experiment
    data: bool  # whether to check the data of tasks too


class Train(NamedTuple):
    """The request to make a run: the answer is `Began`."""

    config: Path  # the recipe's file
    output: Path  # the run's directory
    resume: bool  # continue the run that is there, and its log


class Began(NamedTuple):
    """The answer that a run's process has started."""

    process: int


class ForkedRun:
    """The process of a run that a starter has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def end(self) -> None:
        """Kill it and everything that it started, and wait until it is gone and holds its directory no longer."""
        import psutil

        from ..sandbox.worker import end_leader

        deadline = time.monotonic() + _END_SECONDS
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            end_leader(process)
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.02)

    def terminate(self) -> None:
        """Ask it to save itself and to end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


RunProcess = subprocess.Popen[bytes] | ForkedRun


class Starter:
    """A process that serves one request at a time. It starts at the first one, and again if it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def begin(self) -> None:
        """Start the process, which imports while this one goes on. Does nothing if it is there."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        self._connection, theirs = Pipe()
        with theirs, signals_held():  # Ctrl-C reaches it too, and must not end its imports with a traceback
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pods_rl.cli.starter", str(theirs.fileno())],
                # no file here shadows a module; a starter that outlived this process would keep its memory
                env={**os.environ, "PYTHONSAFEPATH": "1", PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def check(self, experiment: Experiment, *, data: bool) -> list[str]:
        """Check the recipe of each arm, and with `data` its task's data, as a run does before its first step.

        Returns what the runs would note on their data. Raises UserError for what a run would refuse.
        """
        result: list[str] | UserError = UserError("The check of the recipes ended early. Perhaps the memory is full.")
        for answer in self._answers(Check(experiment, data)):
            if not isinstance(answer, int):
                result = answer
        if isinstance(result, UserError):
            raise result
        return result

    def train(self, config: Path, output: Path, in_progress: set[RunProcess], *, resume: bool = False) -> int:
        """Make a run as `pods train` does, with its output in ``log.txt``; return the exit code.

        `in_progress` has the run's process while it is there, so that signals reach it.
        """
        output.mkdir(parents=True, exist_ok=True)
        code: int | None = None
        run: ForkedRun | None = None
        try:
            for answer in self._answers(Train(config, output, resume)):
                if isinstance(answer, Began):
                    run = ForkedRun(answer.process)
                    in_progress.add(run)
                else:
                    code = answer
            if code is None:  # the starter was killed, and the system kills the run after it
                if run is not None:
                    run.end()
                code = -int(signal.SIGKILL)
        finally:
            in_progress.discard(run)
        return code

    def _answers(self, request: Check | Train) -> Iterator[Any]:
        """Yield the answers to a request; the last is the exit code of its process, unless the starter was killed."""
        self.begin()
        assert self._connection is not None
        with suppress(EOFError, ConnectionError):  # the starter was killed
            self._connection.send(request)
            while True:
                answer = self._connection.recv()
                yield answer
                if isinstance(answer, int):
                    return
        self.end()

    def end(self) -> None:
        """End the process. A run in progress ends with it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Starters:
    """A starter for each run that is made at the same time.

    Where a fork is unsafe, `trains` is false: on a machine with a GPU, whose driver a forked process cannot use, and on
    systems other than Linux. Runs then start in the ordinary way, and one starter only checks.
    """

    def __init__(self, parallel: int, *, trains: bool) -> None:
        self.trains = trains
        self._starters = [Starter() for _ in range(parallel if trains else 1)]
        self._free: SimpleQueue[Starter] = SimpleQueue()

    def __enter__(self) -> Starters:
        for starter in self._starters:
            starter.begin()
            self._free.put(starter)
        return self

    def __exit__(self, *error: object) -> None:
        for starter in self._starters:
            starter.end()

    def check(self, experiment: Experiment, *, data: bool = False) -> list[str]:
        """Check the recipe of each arm (`Starter.check`)."""
        try:
            return self._starters[0].check(experiment, data=data)
        finally:
            if not self.trains:
                self._starters[0].end()  # torch would keep memory of the GPU

    def train(self, config: Path, output: Path, in_progress: set[RunProcess], *, resume: bool = False) -> int:
        """Make a run in a starter that is free (`Starter.train`)."""
        starter = self._free.get()
        try:
            return starter.train(config, output, in_progress, resume=resume)
        finally:
            self._free.put(starter)
