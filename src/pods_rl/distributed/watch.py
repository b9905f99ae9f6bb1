"""A thread of each process that ends it when the run cannot continue: another process failed, stalled or was killed.

A process that waits in a collective can receive nothing there, and a graceful stop waits for the step to end. So the
processes also talk over the store that their process group was made with. The first process prints the failure and
writes the status, whichever process failed. If the first process was killed, the failed process prints and its launcher
writes.
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
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ..text import console, plain_text, safe_text
from .heartbeat import Failure, Position, here, is_of_a_collective, of_broken_collective, of_error, of_stall, overdue
from .processes import get_rank, get_world_size
from .signals import ignore_signals

LAUNCHER = "PODS_LAUNCHER"  # set by our launcher, which reports processes that were killed
POLL = 0.5  # seconds between checks of the others
BEAT = 10.0  # maximum seconds between two heartbeats
MARGIN = 2.0  # seconds before the collective's own limit, whose error would name no process
GRACE = 3.0  # seconds to find out why a collective broke, and for the first process to print


class _Store:
    """Messages between the processes, over a connection of our own: the process group's is blocked while it waits."""

    def __init__(self) -> None:
        self._store: Any = None
        self._lock = threading.Lock()  # a store serves one thread at a time

    def connect(self) -> bool:
        """Return whether there is a connection; try to make one."""
        with self._lock:
            if self._store is None and "torch.distributed" in sys.modules and "MASTER_PORT" in os.environ:
                import torch.distributed as dist

                if _launcher_has_store() or dist.is_initialized():
                    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=GRACE))
                    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                    self._store = dist.PrefixStore(f"pods/{attempt}", store)
            return self._store is not None

    def set(self, key: str, value: Any = True) -> None:
        with self._lock:
            self._store.set(key, json.dumps(value))

    def get(self, key: str, *, wait: bool = False) -> Any:
        """Return the value of a key; None if it is not set. ``wait``: wait for `GRACE` seconds, then raise."""
        with self._lock:
            return json.loads(self._store.get(key)) if wait or self._store.check([key]) else None

    def claim(self, key: str) -> bool:
        """Return whether this process is the first to claim a key."""
        with self._lock:
            return bool(self._store.add(key, 1) == 1)


class Watch:
    """Watches the other processes of a run, and ends this one.

    Args:
        limit: seconds to wait for another process: `ddp_timeout`.
        on_failure: called once on the first process, in any thread, before anything is printed.
    """

    def __init__(self, limit: float, on_failure: Callable[[Failure], None]) -> None:
        self._limit, self._on_failure = limit, on_failure
        self.rank = get_rank()
        self._other_ranks = [rank for rank in range(get_world_size()) if rank != self.rank]
        self._parent = os.getppid()
        self._host = f"{socket.gethostname()}/{_namespace()}/{self._parent}"
        self._store = _Store()
        self._ending = threading.Lock()
        self._done = threading.Event()
        self._introduced = False
        self._pids: dict[int, int | None] = {}  # of each other process that has started; None: another launcher's
        self._last_beat = 0.0
        self._thread = threading.Thread(target=self._run, name="pods-watch", daemon=True)

    def start(self) -> None:
        with suppress(Exception):
            self._connect()  # now, so that a kill in the next moment is noticed
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the others will not report this process as killed."""
        with suppress(Exception):
            self._store.set(f"done/{self.rank}")
        self._done.set()

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an exception in this one."""
        ignore_signals()  # this process is ending, and prints first
        with suppress(Exception):
            self._connect()
        failure = of_error(error, self.rank)
        if is_of_a_collective(error):
            self._wait_until(self._look)  # the process that failed publishes the reason, and `_look` ends this one
            with suppress(Exception):
                failure = of_broken_collective(error, self.rank, here(), self._positions())
        self._publish(failure)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._done.wait(POLL):
            if os.getppid() != self._parent:  # the launcher that would end this process is gone
                os._exit(1)
            with suppress(Exception):  # the store and its process have ended; the collectives will report it
                self._look()

    def _look(self) -> None:
        """Send a heartbeat; end if another process failed, was killed or is late."""
        if not self._connect():
            return
        published = self._store.get("failure")
        self._beat()
        if published is not None:
            self._end(Failure(**published))
        if (killed := self._killed()) is not None:
            reason = f"process {killed} was killed, perhaps out of memory"
            self._publish(Failure(killed, reason, host=self._host))
        own = here()
        early = self._limit - min(MARGIN, self._limit / 10)
        if not own.busy and own.seen - own.since >= early:
            positions = self._positions()
            late = overdue(own, positions, early)
            if late is not None:
                self._publish(of_stall(late, positions[late], self.rank, own, self._limit))

    def _connect(self) -> bool:
        if not self._store.connect():
            return False
        if not self._introduced:
            self._store.set(f"process/{self.rank}", [self._host, os.getpid()])
            self._introduced = True
        return True

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= min(BEAT, self._limit / 10):
            self._last_beat = now
            self._store.set(f"position/{self.rank}", asdict(here()))

    def _positions(self) -> dict[int, Position]:
        """Return the last position of each other process, by rank."""
        found = {rank: self._store.get(f"position/{rank}") for rank in self._other_ranks}
        return {rank: Position(**position) for rank, position in found.items() if position}

    def _killed(self) -> int | None:
        """Return a process of our launcher that ended without publishing a reason, or None."""
        import psutil

        for rank in self._other_ranks:
            if rank not in self._pids and (introduced := self._store.get(f"process/{rank}")):
                host, pid = introduced
                self._pids[rank] = pid if host == self._host else None
        for rank, number in self._pids.items():
            if number and not psutil.pid_exists(number) and not self._store.get(f"done/{rank}"):
                return None if self._store.get("failure") else rank
        return None

    def _wait_until(self, happened: Callable[[], object]) -> bool:
        """Wait up to `GRACE` seconds for a condition; return whether it holds. False if the others are out of reach."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until and self._introduced:
            with suppress(Exception):
                if happened():
                    return True
            time.sleep(POLL / 5)
        return False

    # -- the end ----------------------------------------------------------------------------------------------------

    def _publish(self, failure: Failure) -> NoReturn:
        """Publish a failure, unless another process has published one, and end."""
        first = True
        with suppress(Exception):
            first = self._store.claim("claimed")
            if first:
                self._store.set("failure", asdict(failure))
            failure = Failure(**self._store.get("failure", wait=True))
        self._end(failure, first=first)

    def _end(self, failure: Failure, *, first: bool = False) -> NoReturn:
        """End this process. The first process prints the failure, or if it cannot, the one that published it."""
        self._ending.acquire()  # never released: a second caller waits for the end
        _write_error_file(failure)
        launcher_reports = failure.host == self._host and LAUNCHER in os.environ
        if self.rank == 0:
            if not launcher_reports:
                with suppress(Exception):
                    self._on_failure(failure)
                _print_failure(failure)
            with suppress(Exception):
                self._store.set("printed")
            if not _launcher_has_store():
                time.sleep(2 * POLL)  # the store ends with this process, and the others must read it first
        elif not self._wait_until(lambda: self._store.get("printed")) and first and not launcher_reports:
            _print_failure(failure)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(failure.code)  # an orderly exit would wait for collectives that never end


def _print_failure(failure: Failure) -> None:
    if failure.state != "failed":
        return
    console(stderr=True).print(f"[red]Error:[/red] {safe_text(failure.reason)}")
    if failure.details:
        print(plain_text(failure.details), end="", file=sys.stderr)


def _write_error_file(failure: Failure) -> None:
    """Write the file from which torch's launcher reads why a process failed; not for a killed process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not failure.host:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": failure.reason, "timestamp": int(time.time())}))


def _launcher_has_store() -> bool:
    """Return whether the launcher made the store; otherwise the first process makes it with the process group."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _namespace() -> str:
    """Return the namespace of our process ids; ids of another namespace mean other processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@contextmanager
def watching(limit: float, on_failure: Callable[[Failure], None]) -> Iterator[None]:
    """Inside, all processes of a run end when one of them raises, stalls or is killed.

    A single process is not watched. Of several, none raises: each exits with the failure's code.
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
