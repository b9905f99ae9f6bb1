"""The tiny policy shipped with the package, and the script that trained it."""

from __future__ import annotations

from pathlib import Path

TINY = "tiny"  # its name in a recipe


def tiny_policy_path() -> Path:
    """Where the shipped policy lies: a folder for `AutoModelForCausalLM.from_pretrained` and its tokenizer.

    >>> (tiny_policy_path() / "config.json").is_file()
    True
    """
    return Path(__file__).parent / "tiny"
