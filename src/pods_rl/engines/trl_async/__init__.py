"""PODS in TRL's asynchronous trainer: a vLLM server generates while the policy trains.

Names are loaded on first use. TRL's module is experimental, so only the version that this package was written for is
accepted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...errors import UserError

VERSION = "1.16"  # of TRL; every 1.16.x

_HOME = {"AsyncPODSConfig": "config", "AsyncPODSTrainer": "trainer", "LostRolloutsError": "worker"}


def check_version() -> None:
    """Raise UserError unless the installed TRL is the version that this package was written for."""
    import trl

    if trl.__version__.split(".")[:2] != VERSION.split("."):
        raise UserError(
            f"AsyncPODSTrainer is written for the experimental asynchronous trainer of TRL {VERSION}, and trl "
            f"{trl.__version__} is installed: pip install 'trl=={VERSION}.*'"
        )


def __getattr__(name: str) -> Any:
    if name in _HOME:
        check_version()  # before names are imported that another version may lack
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
