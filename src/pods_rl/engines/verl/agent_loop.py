"""The agent-loop manager that asks for n sessions of a training prompt, where `rollout.n` is m."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from .settings import read_settings

# Verl's own name for the number of sessions of one prompt; a data set may hold it as a column.
ROLLOUT_N = "__rollout_n__"


class PODSAgentLoopManager(AgentLoopManagerTQ):
    """Verl's manager, but training prompts are generated `sampler_kwargs.num_rollouts` times.

    So `rollout.n`, from which verl computes mini-batches, padding and loss denominators, is what is trained. Validation
    batches, and prompts whose data set gives a number of its own, pass as they are.

    Raises:
        UserError: see `settings.read_settings`.
    """

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        self.pods = read_settings(config)
        super().__init__(config, *args, **kwargs)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Dispatch a batch to the workers, as verl does; a training batch with n added."""
        validation = "validate" in prompts and bool(prompts["validate"])
        if not validation and ROLLOUT_N not in prompts:
            prompts = prompts.copy()
            prompts[ROLLOUT_N] = NonTensorData(self.pods.num_rollouts)
        super().generate_sequences(prompts)
