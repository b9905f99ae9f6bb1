"""Which versions of an engine's library a plug-in supports."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import UserError


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
    for version in supported:
        if re.fullmatch(rf"{re.escape(version)}([.+].*)?", installed):
            return
    raise UserError(
        f"{library} {installed} is installed, and PODS works with {library} {', '.join(supported)}: install one of "
        f"them, for example pip install {library}=={example}."
    )
