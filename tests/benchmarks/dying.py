"""What stands in for the process of the GPU benchmark's cells, and goes wrong: loads nothing."""

from __future__ import annotations

import os
import time
from typing import Any


def work(connection: Any, kind: str) -> None:
    connection.send({"device": kind, "pid": os.getpid()})
    while True:
        try:
            name = connection.recv()["name"]
        except EOFError:
            return
        if name == "dies":
            os._exit(7)
        if name == "hangs":
            time.sleep(3600)
        if name == "is too large":
            connection.send({"out_of_memory": "update"})
        connection.send({"pid": os.getpid()})
