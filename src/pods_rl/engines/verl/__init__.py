"""The verl engine: PODS as plug-ins of verl's trainer (the only package here that imports verl)."""

from __future__ import annotations

import re

from ...distributed.processes import version
from ...errors import UserError

VERSIONS = ("0.9.0", "0.9.1", "0.10.0")  # 0.10.0: its development versions


def check_version(installed: str | None) -> None:
    """Raise UserError for a version of verl that the plug-ins do not support. If None, verl is not installed.

    >>> check_version("0.10.0.dev0")
    """
    if installed and not any(re.fullmatch(rf"{re.escape(known)}([.+].*)?", installed) for known in VERSIONS):
        raise UserError(
            f"verl {installed} is installed, and PODS works with verl {', '.join(VERSIONS)}: install one of them, for "
            "example pip install verl==0.9.1."
        )


# here, so that every plug-in is refused before verl loads a model
check_version(version("verl"))
