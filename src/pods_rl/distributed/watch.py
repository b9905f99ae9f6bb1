"""A thread of each process that ends it when the run cannot go on: another one failed, stalled or was killed.

A process that waits in a collective cannot be told anything there, and a graceful stop waits for the step to end. So
the processes talk past the training, over the store that their process group was made with. Who prints and writes the
status is the first process, whoever failed; where that one is gone, the failed one prints and its launcher writes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ..text import console, plain_text, safe_text
from .failure import Failure, is_of_a_collective, of_broken_collective, of_error, of_stall
from .heartbeat import Position, here, overdue
from .processes import get_rank, get_world_size
from .signals import ignore_signals

LAUNCHER = "PODS_LAUNCHER"  # set by ours, which tells how a process ended without a word
POLL = 0.5  # seconds between looks at the others
BEAT = 10.0  # most seconds between two words about where we stand
MARGIN = 2.0  # seconds before the collective's own limit, whose error would name nobody
GRACE = 3.0  # seconds to find out why a collective broke, and for the first process to print


class Watch:
    """Watches the other processes of a run, and ends this one.

    Args:
        limit: seconds to wait for another process: `ddp_timeout`.
        on_failure: called once on the first process, in any thread, before anything is printed.
    """

    def __init__(self, limit: float, on_failure: Callable[[Failure], None]) -> None:
        self._limit, self._on_failure = limit, on_failure
        self.rank, self._world = get_rank(), get_world_size()
        self._parent = os.getppid()
        self._host = f"{socket.gethostname()}/{_namespace()}/{self._parent}"
        self._store: Any = None
        self._talking = threading.RLock()  # a store serves one thread at a time
        self._ending = threading.Lock()
        self._done = threading.Event()
        self._neighbours: dict[int, int] = {}  # process id of each that our launcher started
        self._met = {self.rank}
        self._spoke = 0.0
        self._thread = threading.Thread(target=self._run, name="pods-watch", daemon=True)

    def start(self) -> None:
        with suppress(Exception):
            self._connect()  # now, so that a kill in the next moment is noticed
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; the others will not miss this process."""
        with suppress(Exception), self._talking:
            if self._store:
                self._store.set(f"done/{self.rank}", "")
        self._done.set()

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an exception in this one."""
        ignore_signals()  # we are ending, and have something to say first
        with suppress(Exception):
            self._connect()
        failure = of_error(error, self.rank)
        if is_of_a_collective(error):
            self._find_cause()
            with suppress(Exception):
                failure = of_broken_collective(error, self.rank, here(), self._others())
        self._publish(failure)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._done.wait(POLL):
            if os.getppid() != self._parent:  # nobody is left to end us
                os._exit(1)
            try:
                self._look()
            except Exception:  # the store is gone, and with it whoever held it; the collectives will say
                continue

    def _look(self) -> None:
        self._connect()
        if self._store is None:
            return
        with self._talking:
            told = self._store.get("failure") if self._store.check(["failure"]) else None
            self._speak()
        if told is not None:
            self._end(Failure.from_json(told))
        if (lost := self._lost()) is not None:
            self._publish(self._of_lost(lost))
        own = here()
        early = self._limit - min(MARGIN, self._limit / 10)
        if not own.busy and own.seen - own.since >= early:
            others = self._others()
            late = overdue(own, others, early)
            if late is not None:
                self._publish(of_stall(late, others[late], self.rank, own, self._limit))

    def _connect(self) -> None:
        if self._store is not None or "torch.distributed" not in sys.modules:
            return
        import torch.distributed as dist

        if not (_launcher_has_store() or dist.is_initialized()) or "MASTER_PORT" not in os.environ:
            return
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with self._talking:
            if self._store is None:
                # a connection of our own: the process group's is taken while it waits
                store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=GRACE))
                run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self._store = dist.PrefixStore(f"pods/{run}", store)
                self._store.set(f"process/{self.rank}", json.dumps([self._host, os.getpid()]))

    def _speak(self) -> None:
        now = time.monotonic()
        if now - self._spoke >= min(BEAT, self._limit / 10):
            self._spoke = now
            self._store.set(f"position/{self.rank}", json.dumps(here().to_dict()))

    def _others(self) -> dict[int, Position]:
        known = {}
        with self._talking:
            for rank in range(self._world):
                if rank != self.rank and self._store.check([f"position/{rank}"]):
                    known[rank] = Position(**json.loads(self._store.get(f"position/{rank}")))
        return known

    def _lost(self) -> int | None:
        """A process of our launcher that has gone without a word."""
        import psutil

        with self._talking:
            self._meet()
            for rank, number in self._neighbours.items():
                if not psutil.pid_exists(number) and not self._store.check([f"done/{rank}"]):
                    return None if self._store.check(["failure"]) else rank
        return None

    def _meet(self) -> None:
        """Learn the process ids of those that have come since."""
        for rank in range(self._world):
            if rank not in self._met and self._store.check([f"process/{rank}"]):
                self._met.add(rank)
                host, number = json.loads(self._store.get(f"process/{rank}"))
                if host == self._host:
                    self._neighbours[rank] = number

    def _of_lost(self, rank: int) -> Failure:
        return Failure(rank, f"process {rank} was killed, perhaps out of memory", host=self._host)

    def _find_cause(self) -> None:
        """A collective broke: give whoever broke it the time to say so, and the thread the time to see."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until and self._store is not None:
            with suppress(Exception):
                self._look()
            time.sleep(POLL / 5)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _publish(self, failure: Failure) -> NoReturn:
        """Tell the others, unless one has been quicker, and end."""
        first = True
        with suppress(Exception), self._talking:
            if self._store is not None:
                first = self._store.add("claimed", 1) == 1
                if first:
                    self._store.set("failure", failure.to_json())
                failure = Failure.from_json(self._store.get("failure"))
        self._end(failure, first=first)

    def _end(self, failure: Failure, *, first: bool = False) -> NoReturn:
        """End this process; the first to know of the failure prints it where process 0 cannot."""
        self._ending.acquire()  # never given back: whoever comes second waits for the end
        _write_error_file(failure)
        launcher_tells = failure.host == self._host and LAUNCHER in os.environ
        if self.rank == 0:
            if not launcher_tells:
                with suppress(Exception):
                    self._on_failure(failure)
                _say(failure)
            self._note("told")
            if not _launcher_has_store():
                time.sleep(2 * POLL)  # it ends with us, and the others must have heard
        elif not self._noted("told") and first and not launcher_tells:
            _say(failure)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(failure.code)  # an orderly exit would wait for collectives that never end

    def _note(self, key: str) -> None:
        with suppress(Exception), self._talking:
            self._store.set(key, "")

    def _noted(self, key: str) -> bool:
        until = time.monotonic() + GRACE
        while time.monotonic() < until and self._store is not None:
            with suppress(Exception), self._talking:
                if self._store.check([key]):
                    return True
            time.sleep(POLL / 5)
        return False


def _say(failure: Failure) -> None:
    if failure.state != "failed":
        return
    console(stderr=True).print(f"[red]Error:[/red] {safe_text(failure.reason)}")
    if failure.details:
        print(plain_text(failure.details), end="", file=sys.stderr)


def _write_error_file(failure: Failure) -> None:
    """Torch's launcher reads why a process failed from a file of its own; not of one that ended without a word."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not failure.host:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": failure.reason, "timestamp": int(time.time())}))


def _launcher_has_store() -> bool:
    """Whether the store is there from the start; else the first process makes it with the process group."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _namespace() -> str:
    """In which process ids mean the same."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@contextmanager
def watching(limit: float, on_failure: Callable[[Failure], None]) -> Iterator[None]:
    """Inside, an exception in one of several processes ends all of them, as does one that stalls or is killed.

    One process is left alone. Of several none comes out of it by an exception: each exits with the failure's code.
    """
    if get_world_size() == 1:
        yield
        return
    watch = Watch(limit, on_failure)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.fail(error)
    watch.stop()
