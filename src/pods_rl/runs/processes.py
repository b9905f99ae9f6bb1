"""The process that writes a run, and whether it still exists: a killed one leaves the status `running`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def this_process() -> dict[str, Any]:
    """Return what identifies this process: its number, when it started, and the machine or container of the number."""
    import psutil

    return {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": _host()}


def _host() -> str:
    """Return the name of the machine, and on Linux the namespace of its process numbers: containers have their own."""
    host = socket.gethostname()
    with suppress(OSError):
        host += f" {os.readlink('/proc/self/ns/pid')}"
    return host


def has_ended(process: Any) -> bool:
    """Return whether a process of this machine has ended; False if it is unknown, as of another machine.

    >>> has_ended(this_process()), has_ended({**this_process(), "started": 0.0}), has_ended(None)
    (False, True, False)

    Args:
        process: from `this_process`, or anything from a damaged file.
    """
    import psutil

    if not isinstance(process, Mapping) or process.get("host") != _host():
        return False
    pid = process.get("pid")
    started = process.get("started")
    if type(pid) is not int or not isinstance(started, (int, float)):
        return False
    try:
        now = psutil.Process(pid)
        # a second of tolerance: the system's clock may have been set
        return abs(now.create_time() - started) > 1.0 or now.status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return True
