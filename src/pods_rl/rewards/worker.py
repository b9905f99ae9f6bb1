"""A scoring process: two texts in, a score out; it is killed at will."""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..distributed.streams import outlive_output
from ..errors import UserError, raised
from .barrier import close_off
from .processes import (
    CAN_FORK,
    Private,
    end_family,
    flush,
    frame,
    give_up_after,
    lead,
    no_copies,
    supervise,
    without_input,
)

MEMORY_BYTES = 3 << 30  # a tower of powers fills any memory within seconds; past this the process gives up
READY = "ready"
CLOSED = 97  # exit code of a child whose input is closed; a reward that calls os._exit gives another


Answer = Callable[[str, str], str]  # of two texts, what goes back


def main(function: str = "") -> None:
    """Answer each line `[number, [text, gold, limit, patience]]` with `[number, answer]`, until standard input closes.

    Without a function, `mathematics.equal` says whether two answers are equal: 1 or 0. With the import path of a user's
    reward, the answer is its score, or `{"raised": reason}`. It is "timeout" after `limit` seconds of processor time or
    `patience` of wall time (0: no such limit), and "crash" where the process died. Where the system can fork, a child
    does the work and is replaced when it dies, which costs milliseconds; elsewhere the pool kills this very process at
    its limit. A child whose pool died in mid-answer ends with this process, or at its limit.

    The reward finds standard input empty, and what it prints goes to standard error.
    """
    requests, replies = os.dup(0), os.dup(1)  # not inherited by programs
    without_input()
    os.dup2(2, 1)  # whatever a library prints must not be read as a verdict
    try:
        if CAN_FORK:
            lead()
        with no_copies():
            answer = _own(function) if function else _math()
    except BaseException as error:
        _say(replies, 0, " ".join(str(error).split()) if isinstance(error, UserError) else raised(error))
        return
    _say(replies, 0, READY)
    bar = flush if function else close_off  # a user's own reward may do what it likes
    serve = partial(_serve, requests, replies, answer, bar)
    if CAN_FORK:
        _supervise(replies, serve)
        end_family(os.getpid())
    else:
        serve(bytearray(8))


def _math() -> Answer:
    logging.disable(logging.CRITICAL)
    _warm_up()
    _limit_memory()
    return lambda gold, answer: str(int(_equal(gold, answer)))


def _own(function: str) -> Answer:
    from . import get_reward

    with outlive_output(None):
        reward = get_reward(function)

    def answer(text: str, gold: str) -> str:
        try:
            with outlive_output(None), no_copies():  # what it prints is dropped once nobody reads it
                return json.dumps(reward(text, gold))
        except BaseException as error:  # SystemExit too
            return json.dumps({"raised": raised(error)})
        finally:
            flush()

    return answer


def _supervise(replies: int, serve: Callable[[mmap.mmap], None]) -> None:
    """Keep a child that serves; say what became of the request it died of."""
    working = mmap.mmap(-1, 8)  # shared with the child: the number of the request that it works on, or 0
    while True:
        working[:] = bytes(8)
        code = supervise(partial(serve, working))
        number = int.from_bytes(working[:], "big")
        if number:  # else nobody asked
            _say(replies, number, "timeout" if code in (-signal.SIGPROF, -signal.SIGALRM) else "crash")
        elif code == CLOSED:
            return


def _serve(
    requests: int, replies: int, answer: Answer, bar: Callable[[], None], working: mmap.mmap | bytearray
) -> None:
    pipes = Private(requests, replies) if CAN_FORK else None
    bar()
    with open(requests, encoding="utf-8", closefd=False) as lines:
        while True:
            if pipes:
                pipes.check()
            line = lines.readline()
            if not line:
                raise SystemExit(CLOSED)
            number, (text, gold, limit, patience) = json.loads(line)
            working[:] = number.to_bytes(8, "big")
            give_up_after(limit, patience)
            reply = answer(text, gold)
            give_up_after(0.0, 0.0)
            if pipes:
                pipes.check()  # while the request is still open: it died of this
            working[:] = bytes(8)
            _say(replies, number, reply)


def _say(replies: int, number: int, word: str) -> None:
    with suppress(BrokenPipeError):  # whoever asked is gone
        os.write(replies, frame(number, word))


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
