"""The verifier process: a pair of expressions in, one digit out; its pool kills it at will."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

MEMORY_BYTES = 3 << 30  # a tower of powers fills any memory within seconds; past this the process gives up


def main() -> None:
    """Answer each line `[gold, answer, limit]` of standard input by 1 (equal) or 0, until it closes.

    A process whose pool died in mid-answer ends by itself a second after the limit, whatever it is computing.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be read as a verdict
    logging.disable(logging.CRITICAL)
    _import_verifier()
    _limit_memory()
    print("ready", file=channel, flush=True)
    for line in sys.stdin:
        gold, answer, limit = json.loads(line)
        _alarm(limit + 1.0)
        verdict = _equal(gold, answer)
        _alarm(0.0)
        print(int(verdict), file=channel, flush=True)


def _equal(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    try:
        sides = [
            parse(f"${side}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
            for side in (gold, answer)
        ]
        return bool(verify(*sides, timeout_seconds=None))
    except MemoryError:
        os._exit(1)  # nothing allocated here can be trusted any more: a fresh process takes over
    except Exception:
        return False  # what cannot be parsed or compared is not right


def _import_verifier() -> None:
    import math_verify  # noqa: F401  (before "ready", so that the import is in nobody's time limit)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _alarm(seconds: float) -> None:
    """Have the system end this process after so many seconds, whatever Python does; 0 calls it off."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
