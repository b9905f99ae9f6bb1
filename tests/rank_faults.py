"""Rewards and rules that fail on one process of several."""

import os
import signal
import time

import torch


def raises_on_one(text: str, gold: str) -> float:
    """A reward that raises on process 1."""
    if os.environ["RANK"] == "1":
        raise ValueError("no score for this one")
    return float(len(text))


def counts(text: str, gold: str) -> float:
    """A reward that does not fail; each process scores it in processes of its own."""
    return float(len(text))


def kills_one(rewards: torch.Tensor, m: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """A rule that kills process 1."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.arange(m).repeat(len(rewards), 1)


def stalls_on_one(rewards: torch.Tensor, m: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """A rule that never returns on process 1."""
    if os.environ["RANK"] == "1":
        time.sleep(3600)
    return torch.arange(m).repeat(len(rewards), 1)
