"""The SkyRL engine: PODS as a generator around SkyRL's own (the only package here that imports SkyRL)."""

from __future__ import annotations

import re

from ...distributed.processes import version
from ...errors import UserError

VERSIONS = ("0.3", "0.4")


def check_version(installed: str | None) -> None:
    """Raise UserError for a version of SkyRL that the generator does not support. If None, SkyRL is not installed.

    >>> check_version("0.4.0")
    """
    if installed and not any(re.fullmatch(rf"{re.escape(known)}([.+].*)?", installed) for known in VERSIONS):
        raise UserError(
            f"skyrl {installed} is installed, and PODS works with skyrl {' and '.join(VERSIONS)}: install one of them, "
            "for example pip install skyrl==0.4.0."
        )


# here, so that it is refused before SkyRL starts an inference engine
check_version(version("skyrl"))
