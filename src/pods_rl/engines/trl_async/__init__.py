"""PODS in TRL's asynchronous trainer: a vLLM server generates while the policy trains."""

from __future__ import annotations

import trl

from ...errors import UserError
from .. import TESTED

# TRL's asynchronous trainer is experimental: a release may change it, a patch release does not.
VERSION = TESTED["trl"].rpartition(".")[0]

# here, before names are imported that another version may lack
if trl.__version__.split(".")[:2] != VERSION.split("."):
    raise UserError(
        f"AsyncPODSTrainer is written for the experimental asynchronous trainer of TRL {VERSION}, and trl "
        f"{trl.__version__} is installed: pip install 'trl=={VERSION}.*'"
    )

from .trainer import AsyncPODSConfig, AsyncPODSTrainer  # noqa: E402
from .worker import LostRolloutsError  # noqa: E402

__all__ = ["AsyncPODSConfig", "AsyncPODSTrainer", "LostRolloutsError"]
