"""Rewards of a user's own, as recipes name them: one completion in 64 makes each misbehave."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import DEADLINE

ODD = "17"  # the completion, and the row, that it happens to


def columns_of(texts: list[str], answer: str) -> dict[str, Any]:
    """What TRL calls a reward function with."""
    rows = {"prompts": texts, "completions": texts, "completion_ids": [[0]] * len(texts)}
    return rows | {"answer": [answer] * len(texts), "log_extra": lambda *_: None, "log_metric": lambda *_: None}


def running(mark: str) -> list[int]:
    """Processes that run a program with this text among its words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if mark.encode() in words and b"time.sleep" in words:
                found.append(int(path.parent.name))
    return found


def gone(mark: str) -> bool:
    """Whether all of these have ended, or do so while one waits."""
    until = time.monotonic() + DEADLINE
    while running(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def good(text: str, gold: str) -> float:
    return int(text) % 5 / 4 if text.isdigit() else len(text) % 5 / 4


def hangs(text: str, gold: str) -> float:
    """Starts a process and waits for ever."""
    if text == ODD:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep(600)  # {gold}"], check=False)
    return good(text, gold)


def leaves_behind(text: str, gold: str) -> float:
    """Leaves three processes: a program, one in a session of its own, and one whose parent is gone."""
    words = [sys.executable, "-c", f"import time; time.sleep(600)  # {gold}"]
    subprocess.Popen(words)
    subprocess.Popen(words, start_new_session=True)
    subprocess.run(["sh", "-c", 'setsid "$@" &', "sh", *words], check=True)
    return good(text, gold)


def leaves_behind_and_spins(text: str, gold: str) -> float:
    leaves_behind(text, gold)
    return spins(ODD, gold)


def spins(text: str, gold: str) -> float:
    while text == ODD:
        pass
    return good(text, gold)


def never(text: str, gold: str) -> float:
    raise KeyError(f"\x1b[2Jno {text}")


def rows_of_good(completions: list[str], **_: Any) -> list[float]:
    return [good(text, "") for text in completions]


def fickle(text: str, gold: str) -> float:
    """What each text asks for."""
    if text == "raise":
        raise ValueError("not\n  this \x1b[2J" + "9" * 1000)
    if text == "exit":
        raise SystemExit(0)
    if text == "hang":
        time.sleep(3600)
    if text == "print":
        print("0.25\n0.5")  # must not be read as a score
        return 0.75
    return {"nan": math.nan, "inf": math.inf, "none": None, "true": True}[text]  # type: ignore[return-value]


# -- what a reward may do to its own process ---------------------------------------------------------------------------

WRONG = 0.875  # no right score of `good`


def _fork_and_return() -> float | None:
    return None if os.fork() else WRONG


def _leave_it_to_a_copy() -> float | None:
    if os.fork():
        os._exit(0)
    return WRONG


def _return_late_in_a_daemon() -> float | None:
    if os.fork():
        return None
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(0.2)
    return WRONG


def _write_half_a_line_everywhere() -> None:
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b"\xff\x00\x00\x10[1, ")


def _close_everything() -> None:
    os.closerange(3, 256)


def _become_another_program() -> None:
    os.execv(sys.executable, [sys.executable, "-c", "print(0.875)"])


def _use_multiprocessing() -> float | None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return None if pool.map(abs, [-1, -2]) == [1, 2] else WRONG


def _exit_from_a_thread() -> None:
    threading.Timer(0.05, os._exit, [0]).start()


def _end_the_leader() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


# What each does, and whether the row that it happens to still gets its right score.
MEDDLERS: dict[str, tuple[Callable[[], float | None], bool]] = {
    "fork and return": (_fork_and_return, True),
    "leave it to a copy": (_leave_it_to_a_copy, False),
    "return late in a daemon": (_return_late_in_a_daemon, True),
    "write half a line everywhere": (_write_half_a_line_everywhere, False),
    "close everything": (_close_everything, False),
    "become another program": (_become_another_program, False),
    "use multiprocessing": (_use_multiprocessing, True),
    "exit from a thread": (_exit_from_a_thread, False),
    "end the leader": (_end_the_leader, False),
}


def meddles(text: str, gold: str) -> float:
    """The gold answer names what row ODD does."""
    wrong = MEDDLERS[gold][0]() if text == ODD else None
    return good(text, gold) if wrong is None else wrong
