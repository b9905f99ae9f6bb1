"""Read the words of a command line as keys of a recipe, and names as paths."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..text import short


def parse_overrides(words: list[str], stray: list[str] | None = None) -> dict[str, str | bool]:
    """Read ``--key value``, ``--key=value`` and bare ``--flag`` (true); the last one of a key wins.

    Any other word goes into ``stray``, or raises UserError.

    >>> parse_overrides(["--num-rollouts", "64", "--beta=0.04", "--use_cpu"])
    {'num_rollouts': '64', 'beta': '0.04', 'use_cpu': True}
    """
    overrides: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--") or word == "--":
            if stray is None:
                raise UserError(f"Unexpected argument {short(word)!r}: expected --key value, as in --seed 1.")
            stray.append(word)
        elif equals:
            overrides[key] = value
        elif rest and not rest[0].startswith("--"):
            overrides[key] = rest.pop(0)
        else:
            overrides[key] = True
    return overrides


def parse_words(words: list[str], config: str | None) -> tuple[str | None, dict[str, str | bool]]:
    """Like parse_overrides, and return the recipe: a positional word, unless an option names it.

    >>> parse_words(["--seed", "1", "tiny-pods"], None)
    ('tiny-pods', {'seed': '1'})
    """
    stray: list[str] = []
    overrides = parse_overrides(words, stray)
    if stray and config is None:
        config = stray.pop(0)
    if stray:
        raise UserError(
            f"Unexpected argument {short(stray[0])!r}: expected --key value, as in --seed 1, after the recipe "
            f"{short(config or '')}."
        )
    return config, overrides


def local_path(name: str | Path) -> Path:
    """Return the path a user gave, whether or not it exists; raise UserError if it cannot be a path."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission to look, ~nobody, a null character
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"{short(str(name))} cannot be a path: {reason}.") from error
    return path


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path: a hub id is ``name`` or ``owner/name``.

    >>> looks_like_path("./model"), looks_like_path("a/b/c"), looks_like_path("Qwen/Qwen2.5-0.5B")
    (True, True, False)
    """
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") > 1 or "\\" in name
