"""Rewards of a user's own, as recipes name them: one completion in 64 makes each misbehave."""

from __future__ import annotations

import subprocess
import sys

ODD = "17"  # the completion, and the row, that it happens to


def good(text: str, gold: str) -> float:
    return int(text) % 5 / 4 if text.isdigit() else len(text) % 5 / 4


def hangs(text: str, gold: str) -> float:
    """Starts a process and waits for ever."""
    if text == ODD:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep(600)  # {gold}"], check=False)
    return good(text, gold)


def spins(text: str, gold: str) -> float:
    while text == ODD:
        pass
    return good(text, gold)


def raises(text: str, gold: str) -> float:
    if text == ODD:
        raise KeyError(f"\x1b[2Jno {text}")
    return good(text, gold)


def gives_text(text: str, gold: str) -> float:
    return "much" if text == ODD else good(text, gold)  # type: ignore[return-value]
