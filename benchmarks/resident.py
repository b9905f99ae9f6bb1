"""Memory, open files and children of a process, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def memory(pid: int | str = "self") -> int:
    """Return resident bytes now."""
    return _status(pid, "VmRSS")


def peak(pid: int | str = "self") -> int:
    """Return peak resident bytes since the process began, or since `reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak() -> bool:
    """Reset the peak to what is resident now; return False if the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def open_files(pid: int | str = "self") -> int:
    """Return the number of open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    """Return process ids of all descendants."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


def _status(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
