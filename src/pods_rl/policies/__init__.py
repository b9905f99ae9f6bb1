"""The shipped policies, in folders of their names. Does not import torch."""

from pathlib import Path

SHIPPED = {"tiny": "arithmetic", "tiny-words": "words"}  # shipped policies, and the task of each


def tiny_policy_path(name: str = "tiny") -> Path:
    """Return the folder of a shipped policy and its tokenizer, as `from_pretrained` reads it.

    >>> (tiny_policy_path() / "config.json").is_file()
    True
    """
    return Path(__file__).parent / name


def policy_path(name: str) -> str:
    """Return the folder of a shipped policy, and any other name (a local path or a hub id) unchanged."""
    return str(tiny_policy_path(name)) if name in SHIPPED else name
