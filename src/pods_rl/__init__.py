"""PODS: generate many rollouts, train on the few that teach most (arXiv 2504.13818).

Names are loaded on first use, so that ``import pods_rl`` costs nothing and ``pods_rl.selection`` never loads TRL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engines.trl import PODSConfig, PODSTrainer, PrefixTreeTrainer, RunDirectory
    from .engines.trl_async import AsyncPODSConfig, AsyncPODSTrainer
    from .selection import (
        BATCH_RULES,
        RULES,
        BatchSelection,
        RolloutBatch,
        Selection,
        advantages,
        pods_objective,
        select,
        select_batch,
    )

_OF_ENGINES = {  # the other names are of `selection`
    "AsyncPODSConfig": ".engines.trl_async",
    "AsyncPODSTrainer": ".engines.trl_async",
    "PODSConfig": ".engines.trl",
    "PODSTrainer": ".engines.trl",
    "PrefixTreeTrainer": ".engines.trl",
    "RunDirectory": ".engines.trl",
}

__all__ = [
    "BATCH_RULES",
    "RULES",
    "AsyncPODSConfig",
    "AsyncPODSTrainer",
    "BatchSelection",
    "PODSConfig",
    "PODSTrainer",
    "PrefixTreeTrainer",
    "RolloutBatch",
    "RunDirectory",
    "Selection",
    "advantages",
    "pods_objective",
    "select",
    "select_batch",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_OF_ENGINES.get(name, ".selection"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
