"""PODS in TRL's asynchronous trainer: a vLLM server generates while the policy trains.

TRL's module is experimental, so only the version that this package was written for is accepted.
"""

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


check_version()  # before names are imported that another version may lack

from .trainer import AsyncPODSConfig, AsyncPODSTrainer  # noqa: E402
from .worker import LostRolloutsError  # noqa: E402

__all__ = ["AsyncPODSConfig", "AsyncPODSTrainer", "LostRolloutsError"]
