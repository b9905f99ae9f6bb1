"""The program of a worker: read questions, answer each in a child that may be killed, and write the replies.

A question is `[number, [question, limit, patience]]`: seconds of processor time and of wall time (0: no limit).
"""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from typing import Any, NamedTuple

from ...errors import UserError, raised
from .processes import (
    CAN_FORK,
    Reply,
    become_leader,
    end_after,
    end_family,
    flush,
    frame,
    no_copies,
    send,
    supervise,
)

CLOSED = 97  # exit code of a child whose questions have ended; a reward that calls os._exit gives another


class Work(NamedTuple):
    """The work of a worker: `answer` maps a question to a JSON value; `prepare` is called in each child."""

    answer: Callable[[Any], Any]
    prepare: Callable[[], object] = flush


def main(maker: str, *arguments: str) -> None:
    """Serve the work that the function at path `maker` returns for these arguments, over standard input and output.

    The work has an empty standard input, and its output goes to standard error.
    """
    questions, replies = os.dup(0), os.dup(1)  # not inherited by programs
    empty_input()
    os.dup2(2, 1)  # output of a library must not be read as a reply
    module, _, name = maker.partition(":")
    lead(questions, replies, lambda: getattr(import_module(module), name)(*arguments))


def lead(questions: int, replies: int, make: Callable[[], Work]) -> None:
    """Make the work, confirm it with the reply to request 0, and answer questions until the pipe closes.

    If the system can fork, a child answers. It is replaced when it dies, which costs milliseconds, and this process
    replies "timeout" or "crash" for it. Otherwise the pool kills this process at its limit.
    """
    try:
        if CAN_FORK:
            become_leader()
        with no_copies():
            work = make()
    except BaseException as error:
        refused = isinstance(error, UserError)
        said = " ".join(str(error).split()) if refused else raised(error)
        _say(replies, 0, Reply("refused" if refused else "raised", said))
        return
    _say(replies, 0, Reply("gave"))
    if not CAN_FORK:
        _serve(questions, replies, work, bytearray(8))
        return
    current = mmap.mmap(-1, 8)  # shared with the child: the number of the request that it works on, or 0
    while True:
        current[:] = bytes(8)
        code = supervise(partial(_serve, questions, replies, work, current))
        if number := int.from_bytes(current[:], "big"):
            _say(replies, number, Reply("timeout" if code in (-signal.SIGPROF, -signal.SIGALRM) else "crash"))
        elif code == CLOSED:
            break
    end_family(os.getpid())


def _serve(questions: int, replies: int, work: Work, current: mmap.mmap | bytearray) -> None:
    pipes = _Private(questions, replies)
    work.prepare()
    with open(questions, "rb", closefd=False) as lines:
        while True:
            pipes.check()
            line = lines.readline()
            if not line:
                raise SystemExit(CLOSED)
            number, (question, limit, patience) = json.loads(line)
            current[:] = number.to_bytes(8, "big")
            end_after(limit, patience)
            try:
                with no_copies():
                    reply = Reply("gave", work.answer(question))
            except BaseException as error:  # SystemExit too
                reply = Reply("raised", raised(error))
            end_after(0.0, 0.0)
            pipes.check()  # during the request: it caused the exit
            current[:] = bytes(8)
            _say(replies, number, reply)


def _say(replies: int, number: int, reply: Reply) -> None:
    with suppress(BrokenPipeError):  # the pool is gone
        send(replies, frame(number, reply))


def empty_input() -> None:
    """Make standard input empty, for this process and every program that it starts."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.set_inheritable(0, True)
    if null:
        os.close(null)


class _Private:
    """Pipes of this process that a reward must not touch: processes that it forks do not have them.

    A program that the reward starts does not have them either, since Python opens pipes with close-on-exec.
    """

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors
        self._pipes = self._identities()
        if CAN_FORK:
            os.register_at_fork(after_in_child=self._close)

    def check(self) -> None:
        """End this process if a descriptor was closed: its number may now be a file of the reward's."""
        if not self._whole():
            os._exit(1)

    def _whole(self) -> bool:
        with suppress(OSError):
            return self._identities() == self._pipes
        return False

    def _identities(self) -> list[tuple[int, int]]:
        return [(status.st_dev, status.st_ino) for status in map(os.fstat, self._descriptors)]

    def _close(self) -> None:
        if self._whole():
            for descriptor in self._descriptors:
                os.close(descriptor)


# -- restrictions of a verifier ----------------------------------------------------------------------------------------

_HARMLESS = re.compile(r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*|[A-Za-z][A-Za-z0-9]*")
_BARRED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.startfile",
    "subprocess.Popen", "pty.spawn", "socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.",
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "shutil.", "tempfile.", "pickle.find_class",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def bar_process() -> None:
    """Bar this process, for good, from evaluating text, starting processes, the network, writing files and pickles.

    Call it when everything is imported, before the first answer of a model. math-verify hands the digits of a number to
    SymPy's parser, which evaluates text as Python: nothing but a number or a name gets there. An audit hook refuses the
    rest, however it is reached. Both raise PermissionError, so that the answer is not right. The hook is not a
    sandbox for machine code, but text can only become Python here.
    """
    from sympy.parsing import sympy_parser

    read = sympy_parser.parse_expr

    @wraps(read)
    def read_harmless(text: str, *args: Any, **kwargs: Any) -> Any:
        if not is_harmless(text):
            raise PermissionError(f"{text[:80]!r} is neither a number nor a name: it is not evaluated")
        return read(text, *args, **kwargs)

    sympy_parser.parse_expr = read_harmless  # sympify looks it up each time
    sys.addaudithook(_refuse)


def is_harmless(text: object) -> bool:
    """Whether evaluating a text can do nothing: a number in digits, or a bare name (SymPy's own, at late imports).

    >>> is_harmless("0.25"), is_harmless("1e9"), is_harmless("kilo")
    (True, True, True)
    >>> is_harmless("f(1)"), is_harmless("x.y"), is_harmless("__import__"), is_harmless("1if 1else 2")
    (False, False, False, False)
    """
    return isinstance(text, str) and _HARMLESS.fullmatch(text) is not None


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _, mode, flags = arguments
        if ((flags or 0) & _WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
            raise PermissionError("a verifier process must not write a file")
    elif event.startswith(_BARRED):
        raise PermissionError(f"a verifier process must not use {event}")
