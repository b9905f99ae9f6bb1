"""The version of TRL that this engine was written for: its asynchronous trainer is experimental."""

from __future__ import annotations

from ...errors import UserError

VERSION = "1.16"  # of TRL; every 1.16.x


def check_version() -> None:
    """Raise UserError unless the installed TRL is the version that this package was written for."""
    import trl

    if trl.__version__.split(".")[:2] != VERSION.split("."):
        raise UserError(
            f"AsyncPODSTrainer is written for the experimental asynchronous trainer of TRL {VERSION}, and trl "
            f"{trl.__version__} is installed: pip install 'trl=={VERSION}.*'"
        )
