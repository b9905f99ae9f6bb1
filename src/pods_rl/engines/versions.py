"""Which versions of other libraries fit, by their metadata: asked before they are imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from ..errors import UserError

_LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft")


class OldLibraryError(UserError, ImportError):
    """A library is older than pods-rl needs."""


@cache
def check_versions() -> None:
    """Check torch, transformers, TRL, accelerate and peft against the least versions of pods-rl's own metadata.

    A library that is missing is left to its import, and one that is too new to the checks of what we override.

    Raises:
        OldLibraryError: names every library that is too old, and the command that installs those that fit.
    """
    try:
        requirements = requires("pods-rl") or ()
    except PackageNotFoundError:  # imported from a folder on the path, which has no metadata
        return
    too_old = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name not in _LIBRARIES:
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue
        least = [part for part in requirement.specifier if part.operator == ">="]
        if not all(part.contains(installed, prereleases=True) for part in least):
            too_old.append((f"{requirement.name} {installed}", f"'{requirement.name}{requirement.specifier}'"))
    if too_old:
        found = ", ".join(name for name, _ in too_old)
        needed = " ".join(pin for _, pin in too_old)
        raise OldLibraryError(f"Installed are {found}, which are too old for pods-rl: pip install {needed}")


def check_version(library: str, installed: str | None, supported: Sequence[str], *, example: str) -> None:
    """Raise UserError for a version of a library that a plug-in does not support.

    Args:
        library: its name on the package index.
        installed: the version. If None, the library is not installed, and nothing is checked.
        supported: versions, or how they begin: 0.3 stands for 0.3.0 and 0.3.1 too.
        example: a version to name in the message.

    >>> check_version("verl", "0.10.0.dev0", ["0.9.1", "0.10.0"], example="0.9.1")
    """
    if installed is None:
        return
    for begins in supported:
        if re.fullmatch(rf"{re.escape(begins)}([.+].*)?", installed):
            return
    raise UserError(
        f"{library} {installed} is installed, and PODS works with {library} {', '.join(supported)}: install one of "
        f"them, for example pip install {library}=={example}."
    )
