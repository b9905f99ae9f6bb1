"""Verifier processes: they decide whether two expressions are equal, and are killed at a timeout.

math-verify's own timeouts work only in the main thread, and some answers keep it busy forever.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache, wraps
from typing import Any

from ..sandbox.pool import WorkerPool
from ..sandbox.worker import Reply, Work
from .mathematics import Pair, equal

DEFAULT_LIMIT = 5.0  # seconds an answer: math-verify's own default (its parsing_timeout and timeout_seconds)
FIRST_LIMIT = 0.25  # seconds an answer gets at first: 500 gold answers of MATH-500 took 0.15 at most, most 0.002
BATCH_SECONDS = 4.0  # of a batch, for a second try of slower answers
PATIENCE = 10.0  # wall seconds for a second of work, on a busy machine, before a process counts as dead
MEMORY_BYTES = 3 << 30  # a tower of powers fills any memory within seconds; past this the process ends
_WARM_UP = (  # pairs whose comparison imports all that later ones need
    (r"( 3, \frac{\pi}{2} )", r"(3, \pi/2)"),
    ("x^2-1", "(x+1)(x-1)"),
    ("x<3", r"(-\infty, 3)"),
    ("2", r"\sum_{n=0}^\infty \frac{1}{2^n}"),  # SymPy makes its table of sums, in half a second
)


class VerifierPool(WorkerPool):
    """Decide whether pairs of expressions are equal, `size` at a time, `limit` seconds at most each.

    Seconds are of processor time, so that right answers do not fail on a busy machine. Every answer of a batch gets
    `FIRST_LIMIT` seconds; those that took longer are tried again with equal shares of `BATCH_SECONDS` a process, up to
    `limit`. So a few slow answers get the time they need, and a batch in which each one hangs ends after
    `len(batch) / size * FIRST_LIMIT` seconds.

    `timeouts` counts the answers that took too long, `crashes` those whose process ended by itself (out of memory,
    recursion); both score False.
    """

    def __init__(self, size: int | None = None, limit: float = DEFAULT_LIMIT) -> None:
        super().__init__(
            size,
            ["pods_rl.rewards.verifier:verification"],
            runs_user_code=False,
            name="the answer verifier",
            advice="Check that `python -c 'import latex2sympy2_extended'` works",
        )
        self.limit = limit
        self.timeouts = 0
        self.crashes = 0
        self._lock = threading.Lock()

    def verify(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return for each (gold, answer) whether the two are mathematically equal, in order.

        Raises UserError if a process cannot start, rather than return a wrong score.

        >>> pool = VerifierPool(size=1)
        >>> pool.verify([(r"\\\\sqrt{8}", r"2\\\\sqrt{2}"), ("x+1", "x")])
        [True, False]
        >>> pool.close()
        """
        limit = min(self.limit, FIRST_LIMIT)
        replies = self.ask(pairs, limit * PATIENCE, limit)
        late = [i for i, reply in enumerate(replies) if reply.kind == "timeout"]
        share = min(self.limit, BATCH_SECONDS * self.size / max(1, len(late)))
        if share > limit:
            second_replies = self.ask([pairs[i] for i in late], share * PATIENCE, share)
            for i, reply in zip(late, second_replies, strict=True):
                replies[i] = reply
        kinds = [reply.kind for reply in replies]
        with self._lock:
            self.timeouts += kinds.count("timeout")
            self.crashes += kinds.count("crash")
        return [reply == Reply("gave", True) for reply in replies]


def verification() -> Work:
    """The work of a verifier process; imports happen before the first answer, outside its time limit."""
    logging.disable(logging.CRITICAL)
    for gold, answer in _WARM_UP:
        equal(gold, answer)  # not `_equal`, which would hide that a library is missing
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard_limit == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    return Work(_equal, prepare=bar_process)


def _equal(pair: Pair) -> bool:
    try:
        return equal(*pair)
    except MemoryError:
        os._exit(1)  # memory can no longer be trusted: a fresh process takes over
    except Exception:
        return False  # an answer that cannot be parsed or compared is wrong


@lru_cache(maxsize=1)
def default_pool() -> VerifierPool:
    """Return this process's own pool, made on first use (a forked child makes its own)."""
    return VerifierPool()


os.register_at_fork(after_in_child=default_pool.cache_clear)

_HARMLESS = re.compile(
    r"\s*[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*"  # -1.5e3
    r"|[0-9]{1,9}/[0-9]{1,9}"  # 3/2, of SymPy's own tables
    r"|[A-Za-z][A-Za-z0-9]*"  # x1
)
_BARRED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.startfile",
    "subprocess.Popen", "pty.spawn", "socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.",
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "shutil.", "tempfile.", "pickle.find_class",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def bar_process() -> None:
    """Permanently block this process from evaluating text, starting processes, the network, writing files and pickles.

    Call it when everything is imported, before the first answer of a model. math-verify hands the digits of a number to
    SymPy's parser, which evaluates text as Python: only a number or a name may get there. An audit hook refuses the
    rest. Both raise PermissionError, so the answer is wrong. The hook is not a sandbox for machine code.
    """
    from sympy.parsing import sympy_parser

    read = sympy_parser.parse_expr

    @wraps(read)
    def read_harmless(text: str, *args: Any, **kwargs: Any) -> Any:
        if not _HARMLESS.fullmatch(text):
            raise PermissionError(f"{text[:80]!r} is neither a number nor a name: it is not evaluated")
        return read(text, *args, **kwargs)

    sympy_parser.parse_expr = read_harmless  # sympify looks it up each time
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _, mode, flags = arguments
        writes = isinstance(mode, str) and not set(mode).isdisjoint("wax+")
        if writes or (flags or 0) & _WRITING:
            raise PermissionError("a verifier process must not write a file")
    elif event.startswith(_BARRED):
        raise PermissionError(f"a verifier process must not use {event}")
