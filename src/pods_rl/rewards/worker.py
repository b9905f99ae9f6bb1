"""A scoring process: two texts in, a score out; it is killed at will."""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import sys
from collections.abc import Callable

from ..errors import raised
from .barrier import close_off

MEMORY_BYTES = 3 << 30  # a tower of powers fills any memory within seconds; past this the process gives up
CAN_FORK = hasattr(os, "fork")


Answer = Callable[[str, str], str]  # of two texts, the line that goes back


def main(function: str = "") -> None:
    """Answer each line `[text, gold, limit, patience]` of standard input until it closes.

    Without a function, math-verify says whether two expressions are equal: 1 or 0. With the import path of a user's
    reward, the answer is its score, or `{"raised": reason}`. It is "timeout" after `limit` seconds of processor time or
    `patience` of wall time (0: no such limit), and "crash" where the process died. Where the system can fork, a child
    does the work and is replaced when it dies, which costs milliseconds; elsewhere the pool kills this very process at
    its limit. A child whose pool died in mid-answer ends by itself at its limit too.
    """
    channel = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not be read as a verdict
    try:
        answer = _own(function) if function else _math()
    except Exception as error:
        _say(channel, " ".join(str(error).split()))
        return
    _say(channel, "ready")
    bar = (lambda: None) if function else close_off  # a user's own reward may do what it likes
    if CAN_FORK:
        _supervise(channel, answer, bar)
    else:
        _serve(channel, answer, bytearray(1), bar)


def _math() -> Answer:
    logging.disable(logging.CRITICAL)
    _warm_up()
    _limit_memory()
    return lambda gold, answer: str(int(_equal(gold, answer)))


def _own(function: str) -> Answer:
    from . import get_reward

    reward = get_reward(function)

    def answer(text: str, gold: str) -> str:
        try:
            return json.dumps(reward(text, gold))
        except Exception as error:
            return json.dumps({"raised": raised(error)})

    return answer


def _supervise(channel: int, answer: Answer, bar: Callable[[], None]) -> None:
    """Keep a child that serves; say what became of the answer it died of."""
    busy = mmap.mmap(-1, 1)  # shared with the child: whether an answer is being worked on
    while True:
        busy[0] = 0
        child = os.fork()
        if child == 0:
            _serve(channel, answer, busy, bar)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return  # the input is closed
        if busy[0]:  # else nobody asked, and a word now would be taken for the next verdict
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
            _say(channel, "timeout" if late else "crash")


def _serve(channel: int, answer: Answer, busy: mmap.mmap | bytearray, bar: Callable[[], None]) -> None:
    bar()
    for line in sys.stdin:
        busy[0] = 1
        text, gold, limit, patience = json.loads(line)
        give_up_after(limit, patience)
        reply = answer(text, gold)
        give_up_after(0.0, 0.0)
        busy[0] = 0
        _say(channel, reply)


def _say(channel: int, word: str) -> None:
    os.write(channel, f"{word}\n".encode())


def _equal(gold: str, answer: str) -> bool:
    from .mathematics import equal

    try:
        return equal(gold, answer)
    except MemoryError:
        os._exit(1)  # nothing allocated here can be trusted any more: a fresh process takes over
    except Exception:
        return False  # what cannot be parsed or compared is not right


def _warm_up() -> None:
    """Import and build what the first answers need, so that it is in nobody's time limit and every child has it."""
    _equal(r"( 3, \frac{\pi}{2} )", r"(3, \pi/2)")
    _equal("x^2-1", "(x+1)(x-1)")
    _equal("x<3", r"(-\infty, 3)")


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def give_up_after(limit: float, patience: float) -> None:
    """Have the system end this process after `limit` seconds of processor time or `patience` of wall time; 0: never."""
    if hasattr(signal, "setitimer"):
        for number, timer, seconds in (
            (signal.SIGPROF, signal.ITIMER_PROF, limit),
            (signal.SIGALRM, signal.ITIMER_REAL, patience),
        ):
            signal.signal(number, signal.SIG_DFL)
            signal.setitimer(timer, seconds)
