"""The TRL engine: PODS as a subclass of TRL's GRPO trainer.

Names are loaded on first use, so that `batching` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..versions import check_versions

if TYPE_CHECKING:
    from .config import PODSConfig
    from .guarded.rewards import killable
    from .guarded.run_directory import RunDirectory
    from .guarded.stability import UnstableTrainingError
    from .step.trainer import PrefixTreeTrainer
    from .trainer import PODSTrainer

_HOME = {
    "PODSConfig": "config",
    "PODSTrainer": "trainer",
    "PrefixTreeTrainer": "step.trainer",
    "RunDirectory": "guarded.run_directory",
    "UnstableTrainingError": "guarded.stability",
    "killable": "guarded.rewards",
}

__all__ = ["PODSConfig", "PODSTrainer", "PrefixTreeTrainer", "RunDirectory", "UnstableTrainingError", "killable"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        check_versions()  # before TRL's import, which would fail at the first name that it lacks
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value  # the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
