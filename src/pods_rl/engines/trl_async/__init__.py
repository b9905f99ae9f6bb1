"""PODS in TRL's asynchronous trainer: a vLLM server generates while the policy trains."""

from __future__ import annotations

from .version import check_version

check_version()  # before names are imported that another version may lack

from .trainer import AsyncPODSConfig, AsyncPODSTrainer  # noqa: E402
from .worker import LostRolloutsError  # noqa: E402

__all__ = ["AsyncPODSConfig", "AsyncPODSTrainer", "LostRolloutsError"]
