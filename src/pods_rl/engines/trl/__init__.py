"""The TRL engine: PODS as a subclass of TRL's GRPO trainer (the only package that imports TRL)."""

from __future__ import annotations

from .config import PODSConfig
from .guard import UnstableTrainingError
from .killable import killable
from .rollouts import Rollouts
from .trainer import PODSTrainer

__all__ = ["PODSConfig", "PODSTrainer", "Rollouts", "UnstableTrainingError", "killable"]
