"""What tests share: how long they wait for another process, a port where several meet, and the rows of a CSV file."""

import csv
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DEADLINE = 900.0  # seconds after which a wait counts as a hang: a slow machine, or one that stalls, comes nowhere near


def until(there: Callable[[], object], told: Callable[[], object] = str, *, poll: float = 0.01) -> None:
    """Wait until something is so; fail after `DEADLINE` with what `told` returns."""
    deadline = time.monotonic() + DEADLINE
    while not there():
        assert time.monotonic() < deadline, f"waited in vain for {there}: {told()}"
        time.sleep(poll)


def with_time(check: Callable[[float], object], limit: float) -> None:
    """A check whose answers have so many seconds; where a machine stalls for as long, it is made again, with more."""
    import pytest

    for more in (1, 20):
        with suppress(Exception, pytest.fail.Exception):
            check(limit * more)
            return
    check(limit * 400)


def free_port() -> int:
    """A port for processes that start later: below those that the system gives to connections meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
