"""Policies: finding their files, loading them, and the tiny policy shipped with the package."""

from __future__ import annotations

from pathlib import Path


def tiny_policy_path(name: str = "tiny") -> Path:
    """Return the folder of a shipped policy and its tokenizer, as `from_pretrained` reads it.

    >>> (tiny_policy_path() / "config.json").is_file()
    True
    """
    return Path(__file__).parent / name
