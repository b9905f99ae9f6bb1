"""The machine and the code of a run, as `environment.json` and the results of evaluations name them."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress


def processor_name() -> str:
    """Return the model of the processor, as the system names it; its architecture if it does not."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of the working directory; None if it is not a git checkout."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None
